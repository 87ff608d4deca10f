"""On which stream a call runs, what it waits for, and who waits for it."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional, Sequence

import torch
from torch import Tensor

from .checks import refuse
from .events import EventHandle, EventOverlap


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

    @property
    def capturing(self) -> bool:
        return self.comm is not None and torch.cuda.is_current_stream_capturing()

    def order(self, stream: Any) -> None:
        """The next operation goes to this stream."""
        last, self._last = self._last, stream
        if last is None or last == stream:
            return
        # What is not of the same capture has ended before it began, or runs when the graph is replayed.
        if _captures(last) == _captures(stream):
            stream.wait_stream(last)

    def current(self) -> Any:
        """torch's current stream, or None."""
        return None if self.comm is None else torch.cuda.current_stream(self.device)

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
        if allocate_on_comm_stream and not (async_finish and previous_event is not None):
            given = f"True, previous_event {previous_event is not None}, async_finish {async_finish}"
            raise refuse("allocate_on_comm_stream", given, "with previous_event and async_finish")
        return Call(self, previous_event, async_finish, allocate_on_comm_stream)


def _captures(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class Call:
    """One call.

        call = streams.call(previous_event, async_finish, allocate_on_comm_stream)
        with call.run():
            ...                             # operations on call.stream; new tensors by call.allocate
        return call.end(inputs, outputs)    # the event
    """

    def __init__(
        self,
        streams: Streams,
        previous_event: Optional[EventOverlap],
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        self._streams = streams
        self._caller = streams.current()
        self._async_finish = async_finish
        self._apart = async_finish and streams.comm is not None  # on the Buffer's own stream
        self.stream = streams.comm if self._apart else self._caller
        # Memory that the caller's stream has just freed may be in use there later than previous_event.
        self.allocate_here = allocate_on_comm_stream or previous_event is not None
        if self.stream is None:
            return
        event = None if previous_event is None else previous_event.event
        if event is not None and event.event is not None:
            self.stream.wait_event(event.event)
        elif self._apart:
            self.stream.wait_stream(self._caller)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """The call's stream is torch's current one."""
        if self.stream is None:
            yield
            return
        self._streams.order(self.stream)
        if not self._apart:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    @contextlib.contextmanager
    def allocate(self) -> Iterator[None]:
        """Tensors that are made belong to the call's stream if `allocate_here`, else to the caller's. They are not
        filled in here."""
        if not self._apart or self.allocate_here:
            yield
            return
        with torch.cuda.stream(self._caller):
            yield

    def end(self, inputs: Sequence[Optional[Tensor]], outputs: Sequence[Optional[Tensor]]) -> EventOverlap:
        """What the caller gets. From here on the tensors may be freed at any time."""
        if not self._apart:
            return EventOverlap(EventHandle() if self._async_finish else None)
        for tensor in inputs:
            if tensor is not None:
                tensor.record_stream(self.stream)
        for tensor in outputs:
            if tensor is not None:
                tensor.record_stream(self._caller if self.allocate_here else self.stream)
        with torch.cuda.stream(self.stream):
            return EventOverlap(EventHandle())
