"""On which stream a call runs, what it waits for, and who waits for it."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, ContextManager, Optional, Sequence

import torch
from torch import Tensor

from .checks import check_kind, refuse
from .events import EventHandle, EventOverlap

_HERE: ContextManager[Any] = contextlib.nullcontext()
_MOST_STREAMS = 256  # that are remembered by address
_CAPTURES = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_is_capturing: Any = None  # CUDA's function, once it has been needed
# The address of a GPU's current stream. To make an object of torch's for it takes thirty times as long.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Streams:
    """The streams of a Buffer: torch's current one, and its own of high priority. On host devices there are none.

    All ranks must make a group's operations in one order. So an operation on another stream than the one before
    waits for that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.comm: Optional[torch.cuda.Stream] = None
        if device.type == "cuda":
            self.comm = torch.cuda.Stream(device, priority=-1)
        self._last: Any = None
        self._passed: Any = None  # the event by which a stream waits for the one before
        self._by_address: dict[int, Any] = {}

    @property
    def capturing(self) -> bool:
        return self.comm is not None and torch.cuda.is_current_stream_capturing()

    def order(self, stream: Any, waits_for: Any = None) -> None:
        """The next operation goes to this stream. waits_for: a stream for which it waits already."""
        last, self._last = self._last, stream
        if last is stream or last is None or last is waits_for or last == stream:
            return
        # Work that is not of the same capture ended before the capture began, or runs when the graph is replayed.
        if _captures(last) == _captures(stream):
            if self._passed is None:
                self._passed = torch.cuda.Event()
            self._passed.record(last)
            stream.wait_event(self._passed)

    def current(self) -> Any:
        """torch's current stream, or None."""
        if self.comm is None:
            return None
        if _raw_stream is None:
            return torch.cuda.current_stream(self.device)
        address = _raw_stream(self.device.index)
        stream = self._by_address.get(address)
        if stream is None:
            if len(self._by_address) >= _MOST_STREAMS:
                self._by_address.clear()
            stream = self._by_address[address] = torch.cuda.current_stream(self.device)
        return stream

    def call(
        self,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Call:
        """A call.

        One that returns an event runs on the Buffer's own stream. Others run on the caller's, with less work for the
        CPU.
        """
        if previous_event is not None:
            check_kind("previous_event", previous_event, EventOverlap, "None, or an EventOverlap")
        if allocate_on_comm_stream and not (async_finish and previous_event is not None):
            given = f"True, previous_event {previous_event is not None}, async_finish {async_finish}"
            raise refuse("allocate_on_comm_stream", given, "with previous_event and async_finish")
        return Call(self, previous_event, async_finish, allocate_on_comm_stream)


def _captures(stream: Any) -> bool:
    """torch only tells it of its current stream. To make another one current takes twenty times as long."""
    global _is_capturing
    if _is_capturing is None:
        _is_capturing = ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing
        _is_capturing.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    status = ctypes.c_int()
    # The legacy stream has an error while another one captures. It does not capture then.
    failed = _is_capturing(stream.cuda_stream, ctypes.addressof(status))
    return failed == 0 and status.value == _CAPTURES


class Call:
    """One call.

        call = streams.call(previous_event, async_finish, allocate_on_comm_stream)
        with call.run():
            ...                             # operations on call.stream; new tensors by call.allocate
        return call.end(inputs, outputs)    # the event
    """

    __slots__ = ("_apart", "_async_finish", "_caller", "_inside", "_streams", "_waits_for", "allocate_here", "stream")

    def __init__(
        self,
        streams: Streams,
        previous_event: Optional[EventOverlap],
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        self._streams = streams
        self._async_finish = async_finish
        self._inside = False  # the call's stream is torch's current one
        self._waits_for: Any = None
        # Memory that the caller's stream has just freed may be in use there later than previous_event.
        self.allocate_here = allocate_on_comm_stream or previous_event is not None
        self.stream: Any = None
        self._apart = False  # on the Buffer's own stream
        if streams.comm is None:
            return
        self._caller = self.stream = streams.current()
        if async_finish:
            self._apart, self.stream = True, streams.comm
        event = None if previous_event is None else previous_event.event
        if event is not None and event.event is not None:
            self.stream.wait_event(event.event)
        elif self._apart:
            self.stream.wait_stream(self._caller)
            self._waits_for = self._caller

    def run(self, torch_works: bool = True) -> ContextManager[Any]:
        """The call's stream is torch's current one. torch_works False: torch has nothing to do there, so that it may
        stay what it is. That takes less time."""
        if self.stream is None:
            return _HERE
        self._streams.order(self.stream, self._waits_for)
        if not self._apart:
            return _HERE
        self._inside = torch_works
        return torch.cuda.stream(self.stream) if torch_works else _HERE

    def allocate(self) -> ContextManager[Any]:
        """Tensors that are made belong to the call's stream if `allocate_here`, else to the caller's. They are not
        filled in here."""
        if not self._apart or self.allocate_here == self._inside:
            return _HERE
        return torch.cuda.stream(self.stream if self.allocate_here else self._caller)

    def end(self, inputs: Sequence[Optional[Tensor]], outputs: Sequence[Optional[Tensor]]) -> EventOverlap:
        """The event for the caller. From here on the tensors may be freed at any time."""
        if not self._apart:
            return EventOverlap(EventHandle() if self._async_finish else None)
        for tensor in inputs:
            if tensor is not None:
                tensor.record_stream(self.stream)
        for tensor in outputs:
            if tensor is not None:
                tensor.record_stream(self._caller if self.allocate_here else self.stream)
        return EventOverlap(EventHandle(self.stream))
