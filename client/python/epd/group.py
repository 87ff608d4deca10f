"""One rank's membership in a group, and its operations."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any, Optional, Union

from . import _abi
from ._blocking import first_slice, go_on, on_a_thread
from ._handles import is_member
from ._library import library
from ._membership import Membership
from ._shapes import RegionShape
from ._submissions import COMBINE, DISPATCH, UNTOUCHED, ArgumentBlock, ResultBlock, foreign, misfit, no_object
from .buffers import Buffers, DeviceArray, host_view, numpy_array
from .errors import InvalidArgument, Status
from .memory import Memory
from .ticket import Dispatch, Handle, Ticket, checked_timeout, stream_address
from .types import FOREVER, DeviceKind, Progress, Result, ResumeInfo, ReturnWeights, Waits, integer

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_dispatch = library.epd_dispatch
_combine = library.epd_combine
_noop = library.epd_noop
_pack_dispatch = DISPATCH.pack_into
_pack_combine = COMBINE.pack_into
_DISPATCH_BYTES = DISPATCH.size
_COMBINE_BYTES = COMBINE.size
_NO_STREAM = _abi.NO_STREAM


class Group(Membership):
    """One rank's membership in a group; Session.join makes it. A context manager: leaves at its end.

    All ranks submit the same operations in the same order, on the same slots, under the same handles.
    Submissions return at once. Any thread may call anything. Submissions of several threads to one group are
    ordered by the caller.
    """

    # ---- operations --------------------------------------------------------------------------------

    def dispatch(
        self,
        slot: int,
        num_tokens: int = 0,
        *,
        handle: Optional[Handle] = None,
        stream: Any = None,
        omit_weights: bool = False,
        keep_handle: bool = False,
        defer_receive: bool = False,
        zero_padding: bool = False,
        mark_unused: bool = False,
        num_tokens_at: int = 0,
        sms: int = 0,
        timeout_ms: int = 0,
        row_format: int = 0,
        memory: Optional[Memory] = None,
    ) -> Dispatch:
        """Sends the first `num_tokens` rows of the slot's x to the ranks of their experts.

        Reads x, x_scales, topk_idx and topk_weights of the slot, and delivers the recv_* regions. `handle` of the
        returned object names the routing.

        handle         the routing of that dispatch again: topk_idx is not read, num_tokens is 0 or its n
        stream         None: begins at once. On CUDA devices a stream's address, or an object with `cuda_stream`
        omit_weights   topk_weights are not sent along
        keep_handle    the handle stays valid until it is released
        defer_receive  Ticket.wait_sent tells when the inputs may be written again; a stream waits only by
                       Ticket.wait_on_stream
        zero_padding   Layout.PACKED: padding rows of recv_x are zeroed
        mark_unused    rows that no token fills get recv_topk_idx -1, weight 0, recv_src -1
        num_tokens_at  GPUs, in a stream: n is read at this address of device memory
        sms            for this operation; 0: the group's
        timeout_ms     the operation's deadline; 0: the daemon's timeouts.operation_ms, 30 s if not configured
        row_format     of the rows: 0, or i for config.more_formats[i - 1]. The same on all ranks
        memory         arrays of the caller's own in place of regions. The ticket keeps them

        Raises WouldBlock (the slot or the ring is busy: nothing was submitted), NotFound (the handle was released),
        ResourceExhausted (all of num_handles are kept), InvalidArgument, and after a break the break's status.
        """
        if keep_handle and self._abandoned:
            self._release_abandoned()
        try:
            block = self._blocks.pop()
        except IndexError:
            block = ArgumentBlock()
        try:
            if handle is not None and handle._group is not self:
                raise foreign(handle._group.config, self.config)
            _pack_dispatch(
                block.memory,
                0,
                _DISPATCH_BYTES,
                slot,
                num_tokens,
                0 if handle is None else handle.value,
                num_tokens_at,
                omit_weights,
                keep_handle,
                defer_receive,
                zero_padding,
                mark_unused,
                sms,
                timeout_ms,
                row_format,
                0 if memory is None else memory._struct,
            )
            if memory is not None:
                shapes = self._shapes[row_format]
        except AttributeError:
            raise no_object(memory, handle) from None
        except (struct.error, TypeError, IndexError) as error:
            raise misfit(
                self.config,
                error,
                slot=slot,
                num_tokens=num_tokens,
                num_tokens_at=num_tokens_at,
                sms=sms,
                timeout_ms=timeout_ms,
                row_format=row_format,
                omit_weights=omit_weights,
                keep_handle=keep_handle,
                defer_receive=defer_receive,
                zero_padding=zero_padding,
                mark_unused=mark_unused,
            ) from None
        n = None if num_tokens_at else num_tokens
        if handle is not None and not num_tokens:
            n = handle._num_tokens
        if memory is not None:
            memory.check(shapes, "dispatch" if handle is None else "dispatch again", n, None)
        on = _NO_STREAM if stream is None else stream_address(stream)
        if keep_handle:
            block.handle.value = 0
        made = None
        try:
            status = _dispatch(self._handle, block.address, on, block.ticket_address, block.handle_address)
            if not status:
                routing = Handle(self, block.handle.value, keep_handle, n)
                made = Dispatch(self, block.ticket.value, routing, memory)
        except BaseException:
            if keep_handle and block.handle.value:  # Ctrl-C behind the submission
                self._abandoned.append(block.handle.value)
            raise
        self._blocks.append(block)
        if made is None:
            raise self._error(status)
        if timeout_ms or stream is not None:
            self._note_deadline(made, timeout_ms, stream)
        return made

    def combine(
        self,
        slot: int,
        handle: Optional[Handle],
        *,
        stream: Any = None,
        weighted: bool = False,
        num_biases: int = 0,
        return_weights: Union[bool, ReturnWeights] = ReturnWeights.NONE,
        defer_receive: bool = False,
        sms: int = 0,
        timeout_ms: int = 0,
        memory: Optional[Memory] = None,
        num_tokens: int = 0,
        num_tokens_at: int = 0,
    ) -> Ticket:
        """Sends the rows of the slot's y back, and writes the sum for each token of the routing to out.

        out[t] = biases + the sum over ranks, ascending, in float32, rounded once to bf16.

        handle          the routing: Dispatch.handle. None on a rank that has joined a group that runs: that of a
                        dispatch from before, so this rank has no tokens and no rows in it
        weighted        rows are multiplied by topk_weights of the slot; one of weight 0 is left out, even a NaN
        num_biases      how many bias regions are added
        return_weights  which y_weights return to the tokens, as out_weights; True: ReturnWeights.OWN
        stream, defer_receive, sms, timeout_ms, memory: as of dispatch
        num_tokens, num_tokens_at  with memory: n of the handle's dispatch; 0: what that said

        Raises as dispatch does.
        """
        try:
            block = self._blocks.pop()
        except IndexError:
            block = ArgumentBlock()
        try:
            if handle is not None and handle._group is not self:
                raise foreign(handle._group.config, self.config)
            _pack_combine(
                block.memory,
                0,
                _COMBINE_BYTES,
                0 if handle is None else handle.value,
                slot,
                weighted,
                num_biases,
                return_weights,
                defer_receive,
                sms,
                timeout_ms,
                num_tokens,
                0 if memory is None else memory._struct,
                num_tokens_at,
            )
        except AttributeError:
            raise no_object(memory, handle) from None
        except (struct.error, TypeError) as error:
            raise misfit(
                self.config,
                error,
                slot=slot,
                num_biases=num_biases,
                sms=sms,
                timeout_ms=timeout_ms,
                num_tokens=num_tokens,
                num_tokens_at=num_tokens_at,
                return_weights=return_weights,
                weighted=weighted,
                defer_receive=defer_receive,
            ) from None
        if memory is not None and handle is not None:
            n = num_tokens or (None if num_tokens_at else handle._num_tokens)
            memory.check(self._shapes[0], "combine", n, handle._num_recv_rows)
        status = _combine(
            self._handle,
            block.address,
            _NO_STREAM if stream is None else stream_address(stream),
            block.ticket_address,
        )
        ticket = block.ticket.value
        self._blocks.append(block)
        if status:
            raise self._error(status)
        made = Ticket(self, ticket, memory)
        if timeout_ms or stream is not None:
            self._note_deadline(made, timeout_ms, stream)
        return made

    def noop(self, slot: int, *, stream: Any = None) -> Ticket:
        """Goes to the engine and back, and moves nothing. Not collective. Measures the hand-off."""
        slot = self._slot(slot)
        try:
            block = self._blocks.pop()
        except IndexError:
            block = ArgumentBlock()
        status = _noop(
            self._handle, slot, _NO_STREAM if stream is None else stream_address(stream), block.ticket_address
        )
        ticket = block.ticket.value
        self._blocks.append(block)
        if status:
            raise self._error(status)
        made = Ticket(self, ticket)
        if stream is not None:
            self._note_deadline(made, 0, stream)
        return made

    # ---- memory ------------------------------------------------------------------------------------

    def buffers(self, slot: int, row_format: int = 0) -> Buffers[Any]:
        """The regions of a slot as dispatches of a row format have them, without copies. Made once for each.

        Host devices: flat memoryviews of the whole region ("H": bf16, "B": e4m3 or bytes, "f", "i", "q").
        `leave` makes them invalid: to touch one then is a ValueError. All callers get the same ones, so nobody
        else can release one: that is a BufferError, also at the end of a `with` block. CUDA devices: DeviceArray, for
        torch and the like. Raises InvalidArgument (the slot, the row format).
        """
        try:
            views = self._views.get((slot, row_format))
        except TypeError:  # it can't be hashed, and is no number either
            views = None
        return views if views is not None else self._load_views(slot, row_format)

    def numpy(self, slot: int, row_format: int = 0) -> Buffers[np.ndarray[Any, Any]]:
        """The same as numpy arrays in their shapes.

        Host devices only; needs numpy. bf16 comes as uint16, e4m3 as uint8: see epd.numbers. An array keeps the
        membership: the group is left when the last one has died. Raises InvalidArgument (the slot, the row format, the
        device).
        """
        try:
            arrays = self._numpy.get((slot, row_format))
        except TypeError:
            arrays = None
        if arrays is None:
            if self._kind != DeviceKind.HOST:
                raise InvalidArgument("the group is on a CUDA device; allowed for numpy: host devices")
            views = self._arrays(slot, row_format)
            shapes = self._shapes_of(row_format).regions
            arrays = Buffers({region: numpy_array(view, shapes[region]) for region, view in views.items()})
            arrays = self._numpy.setdefault((slot, row_format), arrays)
            self._check_joined()
        return arrays

    def tensors(self, slot: int, row_format: int = 0) -> Buffers[Tensor]:
        """The same as torch tensors in their shapes.

        On the device of the group; needs torch. bf16 comes as bfloat16, e4m3 as float8_e4m3fn (uint8 where torch
        has no such type), opaque rows as uint8. A tensor keeps the membership: the group is left when the last one
        has died. Always the same tensors: what autograd should not keep is written to `tensors(0).y.detach()`. Raises
        InvalidArgument (the slot, the row format).
        """
        try:
            tensors = self._tensors.get((slot, row_format))
        except TypeError:
            tensors = None
        if tensors is None:
            from .torch import regions

            tensors = regions.region_tensors(self, slot, row_format)
            tensors = self._tensors.setdefault((slot, row_format), tensors)
            self._check_joined()
        return tensors

    # ---- the group ---------------------------------------------------------------------------------

    def active(self, rank: int) -> bool:
        """True while the rank takes part; False if it is lost (Policy.DEGRADE), no rank of the group, or the group has
        been left."""
        rank = integer("rank", rank)
        if 0 <= rank < 1 << 32 and library.epd_group_active(self._handle, rank):
            return True
        self._check_process()
        return False

    def active_mask(self) -> Union[memoryview, DeviceArray]:
        """int32 [R] in the group's memory, for kernels: 1 where a rank takes part, 0 where it is lost.

        As the join, or this rank's last resume, has found it. On a CUDA device torch.as_tensor takes it without a
        copy. Read it only. Always the same memory.
        """
        mask = self._mask
        if mask is None:
            owner = self._owner()
            address = ctypes.c_void_p()
            status = library.epd_group_active_mask(owner, ctypes.addressof(address))
            if status:
                raise self._error(status)
            shape = RegionShape((self.config.num_ranks,), "i")
            if self._kind == DeviceKind.HOST:
                mask = self._pinned(host_view(address.value or 0, shape, owner, writable=False))
            else:
                mask = DeviceArray(address.value or 0, shape, owner)
            self._mask = mask
            self._check_joined()
        return mask

    def waits(self) -> Waits:
        """For how long each rank has held up this rank's device since the join. See epd_group_waits: on GPUs only
        times of 100 ms and more are seen.
        """
        ranks = self.config.num_ranks
        times = (ctypes.c_int64 * (2 * ranks))()
        ready = ctypes.addressof(times)
        status = library.epd_group_waits(self._handle, ready, ready + 8 * ranks)
        if status:
            raise self._error(status)
        return Waits(list(times[:ranks]), list(times[ranks:]))

    def resume(self, timeout_ms: int = FOREVER) -> ResumeInfo:
        """After a break every rank calls this, then submits again from resume_op on. Waits until the ranks have
        agreed on the next epoch, not until all have called.

        Raises DeadlineExceeded or WouldBlock (NO_WAIT): not agreed yet. RankLost: the group has ended, or this
        rank was evicted. Ctrl-C ends the wait in the main thread; call it again.
        """
        return self.advance(None, timeout_ms)[1]

    def advance(
        self, ticket: Optional[Ticket] = None, timeout_ms: int = FOREVER
    ) -> tuple[Optional[Result], ResumeInfo]:
        """One step of a program that goes on after breaks: waits for an operation as Ticket.wait does, and if a break
        has undone it, for the next epoch as `resume` does. client/GUIDE.md, "Recovery", has the loop.

        ticket  empty afterwards, unless this raises while the operation is in flight. None, or empty: only resumes

        Returns the result if the operation has ended well, else None; and as resume_op the operation to submit next. A
        break has undone this one all the same if that is not behind it.

        Raises DeadlineExceeded or WouldBlock (NO_WAIT): in flight, or the ranks have not agreed; call again with the
        same ticket. RankLost: the group has ended, or this rank was evicted or late. InvalidArgument,
        ResourceExhausted, InternalError: the operation's own; nothing was resumed. After Ctrl-C the next call goes on.
        """
        timeout_ms = checked_timeout(timeout_ms)
        handle = self._handle
        try:
            block = self._results.pop()
        except IndexError:
            block = ResultBlock()
        block.op_index.value = UNTOUCHED
        number = ctypes.c_uint64(0 if ticket is None else ticket._ticket)
        raw = _abi.ResumeInfo(ctypes.sizeof(_abi.ResumeInfo))
        addresses = ctypes.addressof(number), block.address, ctypes.addressof(raw)

        def call(ms: int) -> int:
            return int(library.epd_group_advance(handle, addresses[0], ms, *addresses[1:]))

        first_ms = first_slice(timeout_ms)
        try:
            status = call(first_ms)
            if status == Status.DEADLINE_EXCEEDED and first_ms != timeout_ms:
                status = go_on(call, timeout_ms)
        finally:
            if ticket is not None and block.op_index.value != UNTOUCHED:
                ticket._keep(block)
        self._results.append(block)
        if status in (Status.DEADLINE_EXCEEDED, Status.WOULD_BLOCK):
            raise self._error(status, None, timeout_ms)
        result = None if ticket is None else ticket._told()
        if status:
            raise self._error(status)
        return result, ResumeInfo(raw.epoch, raw.resume_op, raw.num_active_ranks)

    def restore(self, timeout_ms: int = 0) -> ResumeInfo:
        """Takes back ranks that were lost because they were late, and that live (Policy.DEGRADE_LATE). They and all
        ranks that take part call it, with no operation in flight. It returns when all have called.

        On a rank that was late handles have ended. On a CUDA device its regions are elsewhere, and arrays and tensors
        of before are invalid. timeout_ms 0: the daemon's timeouts.join_ms.

        Raises DeadlineExceeded (names the ranks that have not called), after a break the break's status (resume, and
        call again), RankLost (the group has ended, or this rank was lost for another reason), WouldBlock (an operation
        is in flight), Unsupported, InvalidArgument (another policy).
        """
        timeout_ms = checked_timeout(timeout_ms)
        handle = self._owner()
        before = self._raw_buffers(0, handle).x

        def call() -> Union[ResumeInfo, Exception]:
            raw = _abi.ResumeInfo(ctypes.sizeof(_abi.ResumeInfo))
            status = library.epd_group_restore(handle, timeout_ms, ctypes.addressof(raw))
            if status:
                return self._error(status, None, timeout_ms)
            return ResumeInfo(raw.epoch, raw.resume_op, raw.num_active_ranks)

        made = on_a_thread(call, "epd-restore")
        if isinstance(made, Exception):
            try:
                raise made
            finally:
                del made  # a cycle would keep the membership
        if self._raw_buffers(0, handle).x != before:
            self._revoke()
        return made

    def check(self) -> Progress:
        """How far the group is; raises the status of its break, if it has one."""
        raw = _abi.Progress(ctypes.sizeof(_abi.Progress))
        status = library.epd_group_check(self._handle, ctypes.addressof(raw))
        if status:
            raise self._error(status)
        return Progress(raw.next_op, raw.ended, raw.failed)

    def leave(self) -> bool:
        """Ends the membership. True: it has ended. False: it ends when the last array made from it has died.

        Memoryviews of `buffers` become invalid and keep nothing; slices of them, numpy arrays and DeviceArrays
        do. From here on every other call on the group raises InvalidArgument; `active`, and `pending` of its
        tickets, are False. Calls of other threads, and hooks, that wait for an operation keep the membership until
        they return. Waits for the daemon, at most 5 seconds.
        """
        handle = self._handle
        if handle is None:
            return not is_member(self._address)
        self._handle = None
        self._revoke()
        queue, self._hook_queue = self._hook_queue, None
        if queue is not None:
            queue.put(None)
        del handle  # the last reference leaves
        return not is_member(self._address)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __repr__(self) -> str:
        return f"Group({self.config.name!r}, rank {self.rank} of {self.config.num_ranks})"

    def _note_deadline(self, ticket: Ticket, timeout_ms: int, stream: Any) -> None:
        """For waits without end: see go_on."""
        if self._on_gpu and stream is not None:
            ticket._deadline_ms = FOREVER
        elif timeout_ms:
            ticket._deadline_ms = timeout_ms
