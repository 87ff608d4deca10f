"""A rank's membership in a group: what its tickets, handles and arrays need of it."""

from __future__ import annotations

import ctypes
import os
import weakref
from pickle import PickleBuffer
from queue import SimpleQueue
from typing import Any, Optional, Union

from . import _abi
from ._handles import GroupHandle, NotCopied
from ._hooks import start_hooks
from ._library import library
from ._shapes import RegionShape, SlotShapes, region_shapes
from ._submissions import ArgumentBlock, ResultBlock
from .buffers import Buffers, DeviceArray, host_view, region_address
from .errors import InvalidArgument, Status, last_error
from .types import DeviceKind, GroupConfig, Region, SessionInfo, integer

_groups: weakref.WeakSet[Membership] = weakref.WeakSet()


class Membership(NotCopied):
    """The state of a Group, and calls that are not the caller's."""

    def __init__(self, info: SessionInfo, handle: GroupHandle, config: GroupConfig) -> None:
        self._handle: Optional[GroupHandle] = handle
        self._address = int(handle)
        self._kind = info.device_kind
        self._on_gpu = info.device_kind == DeviceKind.CUDA
        configs = [config.with_format(row_format) for row_format in range(1 + len(config.more_formats))]
        self._shapes = [SlotShapes(each, info.device_kind, region_shapes(each)) for each in configs]  # by row format
        # The keys are slot and row format.
        self._views: dict[tuple[int, int], Buffers[Any]] = {}
        self._numpy: dict[tuple[int, int], Buffers[Any]] = {}
        self._tensors: dict[tuple[int, int], Buffers[Any]] = {}
        self._locks: dict[int, Any] = {}  # by slot: for callers to whom a slot belongs during several calls
        self._counts: dict[int, memoryview] = {}
        self._pins: list[PickleBuffer] = []  # of memoryviews that were handed out
        self._mask: Union[memoryview, DeviceArray, None] = None
        self._blocks: list[ArgumentBlock] = []  # taken out by the call that uses it: pop and append are atomic
        self._results: list[ResultBlock] = []
        self._abandoned: list[int] = []  # kept handles that were collected and not released
        self._hook_queue: Optional[SimpleQueue[Any]] = None
        self._process = os.getpid()
        self.config = config  # as joined
        self.rank: int = library.epd_group_rank(handle)
        self.sum_ranks: int = library.epd_group_sum_ranks(handle)  # as the daemon has chosen
        _groups.add(self)

    def __del__(self) -> None:
        queue = getattr(self, "_hook_queue", None)
        if queue is not None:
            queue.put(None)

    def _error(self, status: int, rank: Optional[int] = None, timeout_ms: int = 0) -> Exception:
        if self._handle is None:
            return InvalidArgument(f"group {self.config.name!r} has been left; allowed: groups that are joined")
        return last_error(status, rank, timeout_ms)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            text = f"the group is of process {self._process}, which attached"
            raise InvalidArgument(f"{text}; allowed: groups that this process joins")

    def _owner(self) -> GroupHandle:
        """A reference for memory of the group: as long as it lives, the membership does."""
        handle = self._handle
        if handle is None:
            raise self._error(Status.INVALID_ARGUMENT)
        return handle

    def _check_joined(self) -> None:
        """For a call that has put something aside while another thread may have left."""
        if self._handle is None:
            self._revoke()
            raise self._error(Status.INVALID_ARGUMENT)

    def _raw_buffers(self, slot: int, handle: GroupHandle) -> _abi.Buffers:
        slot = self._slot(slot)
        raw = _abi.Buffers(ctypes.sizeof(_abi.Buffers))
        status = library.epd_group_buffers(handle, slot, ctypes.addressof(raw))
        if status:
            raise self._error(status)
        return raw

    def _slot(self, slot: Any) -> int:
        number = integer("slot", slot)
        if not 0 <= number < 1 << 32:
            raise InvalidArgument(f"slot is {number}; allowed: 0 .. {(self.config.depth or 4) - 1}")
        return number

    def _shapes_of(self, row_format: int) -> SlotShapes:
        row_format = integer("row_format", row_format)
        if not 0 <= row_format < len(self._shapes):
            raise InvalidArgument(f"row_format is {row_format}; allowed: 0 .. {len(self._shapes) - 1}")
        return self._shapes[row_format]

    def _arrays(self, slot: int, row_format: int) -> dict[Region, Any]:
        """memoryviews, or DeviceArrays."""
        owner = self._owner()
        raw = self._raw_buffers(slot, owner)
        array: Any = host_view if self._kind == DeviceKind.HOST else DeviceArray
        shapes = self._shapes_of(row_format).regions
        return {region: array(region_address(raw, region), shape, owner) for region, shape in shapes.items()}

    def _load_views(self, slot: int, row_format: int) -> Buffers[Any]:
        views = self._arrays(slot, row_format)
        if self._kind == DeviceKind.HOST:
            for view in views.values():
                self._pinned(view)
        buffers = self._views.setdefault((slot, row_format), Buffers(views))
        self._check_joined()
        return buffers

    def _counts_view(self, address: int, count: int) -> memoryview:
        view = self._counts.get(address)
        if view is None:
            made = self._pinned(host_view(address, RegionShape((count,), "i"), self._owner(), writable=False))
            view = self._counts.setdefault(address, made)
        return view

    def _pinned(self, view: memoryview) -> memoryview:
        """The view, which all callers share: nobody but `_revoke` can release it."""
        self._pins.append(PickleBuffer(view))
        return view

    def _revoke(self) -> None:
        """Makes the memoryviews that were handed out invalid, but those that others have taken memory from."""
        pins, self._pins = self._pins, []
        for pin in pins:
            pin.release()
        views = [view for buffers in self._views.values() for view in (*vars(buffers).values(), *buffers.bias)]
        for view in (*views, *self._counts.values(), self._mask):
            if isinstance(view, memoryview):
                try:
                    view.release()
                except BufferError:
                    pass  # it keeps the membership by itself
        self._views.clear()
        self._numpy.clear()
        self._tensors.clear()
        self._counts.clear()
        self._mask = None

    def _release_abandoned(self) -> None:
        for _ in range(len(self._abandoned)):
            value = self._abandoned.pop(0)
            if library.epd_handle_release(self._handle, value) == Status.WOULD_BLOCK:
                self._abandoned.append(value)

    def _hooks(self) -> SimpleQueue[Any]:
        queue = self._hook_queue
        if queue is None:
            queue = self._hook_queue = start_hooks()
        return queue


def _forget_parent() -> None:
    """In a forked child the groups are the parent's: what was handed out of them becomes invalid."""
    for group in list(_groups):
        group._revoke()


os.register_at_fork(after_in_child=_forget_parent)
