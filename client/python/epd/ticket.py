"""Operations in flight, and the routings that they establish."""

from __future__ import annotations

import ctypes
import operator
from functools import partial
from typing import Any, Callable, Optional, Union

from . import _abi
from ._blocking import OPERATION_MS, SLICE_MS, first_slice, go_on
from ._handles import NotCopied
from ._library import library
from ._membership import Membership
from ._submissions import RESULT, UNTOUCHED, ResultBlock
from .errors import InvalidArgument, NotFound, Status
from .memory import Memory
from .types import FOREVER, NO_WAIT, Counts, Result

_ticket_wait = library.epd_ticket_wait
_STATUSES = tuple(Status)

_unpack_result = RESULT.unpack
_OK = Status.OK
_LATE = int(Status.DEADLINE_EXCEEDED)
_NOT_FOUND = int(Status.NOT_FOUND)
_INT32 = 1 << 31


class Handle(NotCopied):
    """The routing of a dispatch, for combine and for later dispatches.

    A kept handle (keep_handle) takes one of the group's num_handles until `release`, or until it is collected:
    then the group gives it back with the next dispatch that keeps one. Others need no release.
    """

    __slots__ = ("_group", "_num_recv_rows", "_num_tokens", "kept", "value")

    def __init__(self, group: Membership, value: int, kept: bool, num_tokens: Optional[int]) -> None:
        self._group = group
        self._num_tokens = num_tokens  # n; None: read from a device's memory
        self._num_recv_rows: Optional[int] = None  # once a wait has told
        self.value = value  # epd_handle_t; the same on all ranks for a dispatch under a handle
        self.kept = kept

    def release(self) -> None:
        """Gives a kept handle back. WouldBlock: an operation in flight uses it. NotFound: it was released."""
        status = library.epd_handle_release(self._group._handle, self.value)
        if status:
            raise self._group._error(status)
        self.kept = False

    def __del__(self) -> None:
        if self.kept:
            self._group._abandoned.append(self.value)

    def __repr__(self) -> str:
        return f"Handle({self.value:#x}{', kept' if self.kept else ''})"


class Ticket(NotCopied):
    """One operation in flight, or nothing (after wait, drop or on_complete).

    On a GPU wait() does not empty it, because the operation may have been captured in a graph:
    then each wait returns for another replay. A ticket keeps its group. Collecting one does not wait: the
    operation goes on and its result is dropped. Ctrl-C ends a wait in the main thread, and the next wait goes on.
    """

    __slots__ = ("__weakref__", "_deadline_ms", "_group", "_kept", "_memory", "_ticket")

    # The operation's deadline as given at its submission; FOREVER: in a stream, so nobody knows. Not set: the daemon's.
    _deadline_ms: int
    # The end of an operation that the library had told when Ctrl-C came. The next wait or Group.advance takes it.
    _kept: Union[Result, Exception]
    handle: Optional[Handle] = None  # of a dispatch

    def __init__(self, group: Membership, ticket: int, memory: Optional[Memory] = None) -> None:
        self._group = group
        self._ticket = ticket
        self._memory = memory  # where outputs are copied when the end is taken

    def wait(self, timeout_ms: int = FOREVER) -> Result:
        """The result, once the operation has ended well; raises its status otherwise.

        timeout_ms: milliseconds, FOREVER, or NO_WAIT. DeadlineExceeded (NO_WAIT: WouldBlock) while `pending`
        is True: still in flight, and the ticket stays valid. NotFound: the ticket is empty or retired, or its
        result has been replaced. Error.rank is the rank that caused a failure.
        """
        if not isinstance(timeout_ms, int) or not -_INT32 <= timeout_ms < _INT32:
            timeout_ms = checked_timeout(timeout_ms)
        group = self._group
        handle = group._handle  # keeps the membership until the end, whoever leaves
        results = group._results
        try:
            block = results.pop()
        except IndexError:
            block = ResultBlock()
        block.op_index.value = UNTOUCHED
        # first_slice(), written out: a wait that ends at once pays for each call of Python's.
        first_ms = SLICE_MS if timeout_ms > SLICE_MS or -1 <= timeout_ms <= 0 else timeout_ms
        try:
            status = _ticket_wait(handle, self._ticket, first_ms, block.address)
            if status == _LATE and first_ms != timeout_ms and block.op_index.value == UNTOUCHED:
                status = self._wait_on(handle, timeout_ms, block)
        except BaseException:
            if block.op_index.value != UNTOUCHED and not group._on_gpu:
                self._keep(block)
            raise
        if status == _NOT_FOUND and not self._ticket and hasattr(self, "_kept"):
            results.append(block)
            return self._take_kept()
        _, _, rank, op_index, rows, seen, launched, done, dropped, runs = _unpack_result(block.memory)
        results.append(block)
        if not status:
            if self.handle is not None:
                self.handle._num_recv_rows = rows
            if not group._on_gpu:
                self._ticket = 0
            return Result(_OK, rank, op_index, rows, seen, launched, done, dropped, runs)
        error = self._error(status, rank if op_index != UNTOUCHED and rank >= 0 else None, timeout_ms)
        if status == Status.NOT_FOUND or (op_index != UNTOUCHED and not group._on_gpu):
            self._ticket = 0
        try:
            raise error
        finally:
            del error  # its traceback has this frame, and the caller's: a cycle would keep group and arrays

    def _keep(self, block: ResultBlock) -> None:
        """For the next wait."""
        _, status, rank, op_index, rows, *rest = _unpack_result(block.memory)
        if status:
            self._kept = self._error(status, rank if rank >= 0 else None)
        else:
            self._kept = Result(_OK, rank, op_index, rows, *rest)
            if self.handle is not None:
                self.handle._num_recv_rows = rows
        self._ticket = 0

    def _take_kept(self) -> Result:
        kept = self._kept
        del self._kept
        if isinstance(kept, Result):
            return kept
        try:
            raise kept
        finally:
            del kept  # as in wait

    def _told(self) -> Optional[Result]:
        """The result that is kept, if the operation has ended well. It is kept no longer."""
        kept = getattr(self, "_kept", None)
        if kept is not None:
            del self._kept
        return kept if isinstance(kept, Result) else None

    def poll(self) -> Optional[Result]:
        """None while the operation is in flight, then as wait."""
        if self.pending:
            return None
        return self.wait(NO_WAIT)

    @property
    def pending(self) -> bool:
        """True while the operation is in flight. False if the group has been left."""
        group = self._group
        if library.epd_ticket_pending(group._handle, self._ticket):
            return True
        group._check_process()
        return False

    def counts(self, timeout_ms: int = FOREVER) -> Counts:
        """The counts of a dispatch, before its rows have all arrived. Does not retire the ticket.

        Raises DeadlineExceeded or WouldBlock (not yet), the operation's own status if it failed first, NotFound
        (a later operation on the slot has replaced them), InvalidArgument (not a dispatch).
        """
        if not isinstance(timeout_ms, int) or not -_INT32 <= timeout_ms < _INT32:
            timeout_ms = checked_timeout(timeout_ms)
        group = self._group
        handle = group._handle
        raw = _abi.Counts(ctypes.sizeof(_abi.Counts))
        address = ctypes.addressof(raw)
        first_ms = first_slice(timeout_ms)
        status = library.epd_ticket_counts(handle, self._ticket, first_ms, address)
        if status == _LATE and first_ms != timeout_ms:
            status = go_on(
                lambda ms: library.epd_ticket_counts(handle, self._ticket, ms, address),
                timeout_ms,
                self._deadline(),
            )
        if status:
            raise self._error(status, None, timeout_ms)
        local = group.config.num_experts // group.config.num_ranks
        return Counts(
            raw.num_recv_rows,
            group._counts_view(raw.rank_offsets, group.config.num_ranks + 1),
            group._counts_view(raw.expert_counts, local),
            group._counts_view(raw.expert_offsets, local + 1) if raw.expert_offsets else None,
        )

    def wait_sent(self, timeout_ms: int = FOREVER) -> None:
        """For an operation with defer_receive: returns when its inputs may be written again. The ticket stays.

        `wait` then waits for the arrival. Raises as `counts` does; InvalidArgument: without defer_receive.
        """
        if not isinstance(timeout_ms, int) or not -_INT32 <= timeout_ms < _INT32:
            timeout_ms = checked_timeout(timeout_ms)
        handle = self._group._handle
        first_ms = first_slice(timeout_ms)
        status = library.epd_ticket_wait_sent(handle, self._ticket, first_ms)
        if status == _LATE and first_ms != timeout_ms:
            status = go_on(
                lambda ms: library.epd_ticket_wait_sent(handle, self._ticket, ms), timeout_ms, self._deadline()
            )
        if status:
            raise self._error(status, None, timeout_ms)

    def wait_on_stream(self, stream: Any) -> None:
        """Makes a stream wait: its later work begins when the operation has ended. The ticket stays.

        stream: an address, or an object with `cuda_stream`. The operation must have been submitted in a stream.
        """
        status = library.epd_ticket_wait_on_stream(self._group._handle, self._ticket, stream_address(stream))
        if status:
            raise self._error(status)

    def event(self) -> int:
        """The address of the CUDA event that completes with the operation (WaitBy.EVENT). The ticket stays.

        It is a cudaEvent_t for functions of CUDA. torch takes no event that it has not made: record one of
        torch's behind the operation in the same stream. NotFound: the slot has a later operation.
        """
        out = ctypes.c_void_p()
        status = library.epd_ticket_event(self._group._handle, self._ticket, ctypes.byref(out))
        if status:
            raise self._error(status)
        return out.value or 0

    def drop(self) -> None:
        """The result is not wanted: the ticket is empty afterwards, and the operation goes on."""
        ticket, self._ticket = self._ticket, 0
        if hasattr(self, "_kept"):
            del self._kept
            return
        if not ticket or library.epd_ticket_drop(self._group._handle, ticket):
            self._group._check_process()

    def on_complete(self, hook: Callable[[Result], object]) -> None:
        """Calls hook(result) once, when the operation has ended, well or not. The ticket is empty afterwards.

        Hooks of a group run on one thread of Python's, in the order of these calls; they may do anything. What
        a hook raises goes to sys.unraisablehook, and the next hook runs. Hooks that have not run when the
        interpreter ends are not called.
        """
        if not callable(hook):
            raise TypeError(f"hook is {hook!r}; allowed: a callable, which takes the Result")
        group = self._group
        if not self._ticket or group._handle is None:
            raise self._error(Status.NOT_FOUND)
        group._check_process()
        if self.handle is None:
            ticket = Ticket(group, self._ticket, self._memory)
        else:
            ticket = Dispatch(group, self._ticket, self.handle, self._memory)
        self._ticket = 0
        group._hooks().put((partial(_outcome, ticket), hook))

    def _wait_on(self, handle: Any, timeout_ms: int, block: ResultBlock) -> int:
        """The status of a wait that is not over after its first slice."""
        return go_on(
            lambda ms: int(_ticket_wait(handle, self._ticket, ms, block.address)),
            timeout_ms,
            self._deadline(),
            lambda: block.op_index.value != UNTOUCHED,
        )

    def _deadline(self) -> int:
        return getattr(self, "_deadline_ms", OPERATION_MS)

    def _error(self, status: int, rank: Optional[int] = None, timeout_ms: int = 0) -> Exception:
        group = self._group
        if group._handle is not None and not self._ticket:
            return NotFound("the ticket is empty: it was waited for, dropped, or given to a hook")
        return group._error(status, rank, timeout_ms)

    def __del__(self, drop: Any = library.epd_ticket_drop) -> None:
        if self._ticket:
            drop(self._group._handle, self._ticket)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self._ticket:#x})" if self._ticket else f"{name}(empty)"


class Dispatch(Ticket):
    """A ticket of a dispatch. `handle` is its routing, valid as soon as the dispatch was submitted."""

    __slots__ = ("handle",)
    handle: Handle

    def __init__(self, group: Membership, ticket: int, handle: Handle, memory: Optional[Memory] = None) -> None:
        self._group = group
        self._ticket = ticket
        self._memory = memory
        self.handle = handle


def checked_timeout(timeout_ms: Any) -> int:
    """Refuses what is no integer, or that the library's int32 can't hold; the others the library judges."""
    allowed = f"1 .. {_INT32 - 1} milliseconds, FOREVER (-1, or 0), or NO_WAIT (-2)"
    try:
        number = operator.index(timeout_ms)
    except TypeError:
        raise TypeError(f"timeout_ms is {timeout_ms!r}; allowed: {allowed}") from None
    if not -_INT32 <= number < _INT32:
        raise InvalidArgument(f"timeout_ms is {number}; allowed: {allowed}")
    return number


def stream_address(stream: Any) -> int:
    """The address of a CUDA stream: an integer, or an object with `cuda_stream`, as torch's streams have."""
    address = getattr(stream, "cuda_stream", stream)
    if not isinstance(address, int):
        try:
            address = operator.index(address)
        except TypeError:
            address = -1
    if not 0 <= address < _abi.NO_STREAM:
        raise TypeError(f"stream is {stream!r}; allowed: an address, or an object with cuda_stream")
    return address


def _outcome(ticket: Ticket) -> Result:
    """Waits, and gives the result also of an operation that failed."""
    handle = ticket._group._handle  # keeps the membership until the end, whoever leaves
    block = ResultBlock()
    block.op_index.value = UNTOUCHED
    while True:
        status = _ticket_wait(handle, ticket._ticket, FOREVER, block.address)
        if status != Status.DEADLINE_EXCEEDED or not library.epd_ticket_pending(handle, ticket._ticket):
            break
    _, _, rank, op_index, *rest = _unpack_result(block.memory)
    if op_index == UNTOUCHED:  # the session or the group is over
        rank, op_index, rest = -1, 0, [0] * 5 + [1]
    elif not status and ticket.handle is not None:
        ticket.handle._num_recv_rows = rest[0]
    ticket._ticket = 0
    return Result(_STATUSES[status], rank, op_index, *rest)
