"""Low-latency mode: each expert's rows in a block of its own, in two slots that take turns."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any, Callable, ContextManager, Optional, Sequence

import torch
from torch import Tensor

import epd
from epd.torch._dynamo import breaks_graphs
from epd.torch.staging import is_copied

from .checks import check_number, check_tensor, refuse
from .events import EventHandle, EventOverlap
from .groups import Groups, Joined, Shape
from .handles import Foreign, LowLatencyHandle, low_latency_routing
from .masks import Masks, without
from .operations import Combining, Dispatching, Meeting, Results, Rows
from .places import Routing, move_tokens
from .rows import LOW_LATENCY_ROWS
from .shrink import Attempt, Step
from .streams import Call, Streams
from .waits import WaitStats, check_stats

Hook = Callable[[], None]

BF16_ROWS, FP8_ROWS, POW2_ROWS, UE8M0_ROWS = range(len(LOW_LATENCY_ROWS))

_HERE: ContextManager[Any] = contextlib.nullcontext()


@breaks_graphs
class _Operation:
    """One on its way: where it runs, and what is to be done when it has arrived."""

    __slots__ = (
        "_async_finish",
        "_call",
        "_ended",
        "_error",
        "_in_stream",
        "_inputs",
        "_joined",
        "_results",
        "_routing",
        "_stats",
        "_step",
        "_steps",
        "_streams",
        "_ticket",
        "cpu_waits",
        "stream",
        "waited",
    )

    def __init__(
        self, joined: Joined, streams: Streams, async_finish: bool, inputs: tuple[Optional[Tensor], ...]
    ) -> None:
        """On the Buffer's own stream if nobody waits for the end, else on the current one."""
        joined.settle()
        self._joined = joined
        self._streams = streams
        self._async_finish = async_finish
        self._inputs: Optional[tuple[Optional[Tensor], ...]] = inputs  # which the operation may read; None: it is over
        self._error: Optional[epd.Error] = None  # with which it ended
        self._in_stream = False  # the caller's stream waits for it
        self._ended = False  # the hook has waited for it; what it delivers may still have to be taken
        self._results: Optional[Results] = None
        self._stats: Optional[Tensor] = None
        self.waited: Optional[WaitStats] = None
        self._call: Optional[Call] = None  # on the Buffer's own stream
        self.stream: Any = None  # None on host devices
        # The object that repeats it; None: nothing does.
        self._steps = joined.steps
        if streams.capturing:
            joined.captured = True
            if self._steps is not None:
                self._steps.captured()
                self._steps = None
        self.cpu_waits = streams.comm is None or self._steps is not None
        if streams.comm is None:
            return
        if async_finish:
            self._call = streams.call(async_finish=True)
            self.stream = self._call.stream
        else:
            self.stream = streams.current()
            streams.order(self.stream)

    def on(self) -> ContextManager[Any]:
        """The operation's stream is torch's current one."""
        return _HERE if self._call is None else self._call.run()

    def begin(self, step: Step, torch_works: bool) -> None:
        """torch_works: copies of inputs are made."""
        self._step = step
        if self._call is None:
            self._submit()
            return
        with self._call.run(torch_works or self._steps is not None):
            self._submit()

    def _submit(self) -> None:
        if self._steps is None:
            self._ticket = self._joined.submit(self._step.submit, Attempt.FIRST)
            self._step.submitted()
        else:
            self._ticket = self._steps.begin(self._joined, self._step)

    def fills(self, results: Results, routing: Routing, stats: Optional[Tensor]) -> None:
        """Sets the outputs that a dispatch fills when it has arrived."""
        self._results, self._routing, self._stats = results, routing, stats

    def later(self) -> Hook:
        """The caller says when it waits."""
        if self.cpu_waits:
            self._joined.remember(self._settle)
        return self.hook

    def hook(self) -> None:
        """Makes the current stream wait for the arrival; the CPU, if it has to. Once: later calls do nothing, or raise
        what the operation ended with. A wait that was interrupted goes on in the next call."""
        if self._inputs is None:
            if self._error is not None:
                raise copy.copy(self._error)
            return
        with self._lock():
            if self._inputs is not None:  # no other thread's call was quicker
                self._hook()

    def _hook(self) -> None:
        if not self._ended:
            self._await_end()
        self._arrive()
        self._inputs = None

    def _await_end(self) -> None:
        try:
            if self.stream is not None and not self._in_stream:
                stream = self._streams.current()
                self._ticket.wait_on_stream(stream)
                self._in_stream = True
                if self._steps is not None:
                    self._step.stream = stream  # if it must be made again
            self._wait()
        except epd.Error as error:
            if not (isinstance(error, epd.DeadlineExceeded) and self._ticket.pending):
                # Not the error itself: its traceback has this frame, and the callers'.
                self._inputs, self._error = None, copy.copy(error)
            raise
        self._ended = True

    def _settle(self) -> None:
        """As hook, before the group's next operation. What has failed was told by the hook."""
        if self._inputs is not None:
            self.hook()

    def finish(self, outputs: Sequence[Optional[Tensor]]) -> EventOverlap:
        """The event that the caller gets."""
        if self._call is None:
            with self._lock():
                self._wait()
                self._arrive()
            return EventOverlap(EventHandle() if self._async_finish else None)
        filled = self._results is not None and self._results.torch_works
        torch_works = filled or self._stats is not None or self.waited is not None
        with self._call.run(torch_works or self._steps is not None), self._lock():
            self._wait()
            self._arrive()
        assert self._inputs is not None
        return self._call.end(self._inputs, outputs)

    def _lock(self) -> ContextManager[Any]:
        """Held from the wait until everything has arrived."""
        return _HERE if self._steps is None else self._steps.lock

    def _wait(self) -> None:
        """The CPU waits, if it has to."""
        if self._steps is not None:
            self._steps.end(self._joined, self._step)
        elif self.stream is None:
            self._ticket.wait()

    def _arrive(self) -> None:
        results = self._results
        if results is not None:
            results.fill(self._routing)
            self._routing.arrived()
            if self._stats is not None:
                self._stats.add_(results.counts)
                self._stats = None
        if self.waited is not None:
            self.waited.add()
            self.waited = None
        if self._steps is not None:
            if self._streams.capturing:  # a hook of an operation of before
                self._steps.captured()
            else:
                self._steps.taken(self._step.stream)


class LowLatencyMode:
    """The low-latency operations of a Buffer. masks: None, if it has no enable_shrink."""

    def __init__(self, groups: Groups, streams: Streams, masks: Optional[Masks]) -> None:
        self._groups = groups
        self._streams = streams
        self._masks = masks
        self._views = os.environ.get("EPD_DEEPEP_VIEWS", "1") != "0" and masks is None
        self._next_rows: Optional[Tensor] = None  # of a zero-copy combine under a handle that no group here knows

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        tokens: int,
        num_experts: int,
        row_format: int,
        stats: Optional[Tensor],
        wait_stats: Optional[Tensor],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Optional[Hook]]:
        joined, tokens = self._joined_for(x, topk_idx, tokens, num_experts, row_format)
        if stats is not None:
            local = (num_experts // self._groups.size,)
            check_tensor(
                "cumulative_local_expert_recv_stats",
                stats,
                dtypes=torch.int32,
                shape=local,
                device=self._groups.device,
            )
        self._check_wait_stats("dispatch_wait_recv_cost_stats", wait_stats)
        operation = _Operation(joined, self._streams, async_finish, (x, topk_idx, stats, wait_stats))
        if wait_stats is not None:
            operation.waited = WaitStats(joined, wait_stats, apart=operation.cpu_waits)
        turn = joined.turns.next()
        masked, chosen = None, topk_idx
        if self._masks is not None and self._masks.hidden is not None:
            masked = self._masks.hidden
            with operation.on():
                chosen = without(masked, topk_idx, num_experts)
        results = self._results(joined, turn.slot, row_format, tokens, masked)
        routing = Routing(joined, turn, tokens, topk_idx, results.counts)
        defer = bool(return_recv_hook) and operation.stream is not None
        step = Dispatching(routing, (x, chosen), results, operation.stream, defer)
        operation.begin(step, torch_works=is_copied(x) or is_copied(chosen))
        operation.fills(results, routing, stats)
        handle = LowLatencyHandle(routing, results.sources, results.layout_range)
        if return_recv_hook:
            return results.rows, results.counts, handle, EventOverlap(), operation.later()
        return results.rows, results.counts, handle, operation.finish(results.own()), None

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        zero_copy: bool,
        async_finish: bool,
        return_recv_hook: bool,
        out: Optional[Tensor],
        wait_stats: Optional[Tensor],
    ) -> tuple[Tensor, EventOverlap, Optional[Hook]]:
        device, routing = self._groups.device, self._own_routing(handle)
        foreign = Foreign(handle, device, self._groups.size) if routing is None else None
        n, topk = (None, None) if routing is None else (routing.num_tokens, routing.joined.shape.topk)
        check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=(n, topk), device=device)
        weights_shape = tuple(topk_idx.shape)
        check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=weights_shape, device=device)
        y_shape = foreign.y_shape if foreign is not None else routing.y_shape  # type: ignore[union-attr]
        check_tensor("x", x, dtypes=torch.bfloat16, shape=y_shape, device=device)
        n, hidden = weights_shape[0], y_shape[2]
        if out is not None:
            check_tensor("out", out, dtypes=torch.bfloat16, shape=(n, hidden), device=device)
            if not out.is_contiguous():
                raise refuse("out.stride()", out.stride(), "a contiguous tensor")
        self._check_wait_stats("combine_wait_recv_cost_stats", wait_stats)
        if zero_copy and routing is not None and not routing.has_blocks_of_group and routing.y is None:
            raise _unasked_rows()
        if foreign is not None:
            x, routing = self._establish(foreign, x, topk_idx, zero_copy)
            zero_copy = False
        assert routing is not None
        joined = routing.joined
        made = self._groups.rows((n, hidden), torch.bfloat16) if out is None else out
        inputs = (x, topk_idx, topk_weights, made, wait_stats, routing.counts, routing.y)
        operation = _Operation(joined, self._streams, async_finish, inputs)
        if wait_stats is not None:
            operation.waited = WaitStats(joined, wait_stats, apart=operation.cpu_waits)
        weights = topk_weights
        if not routing.is_by(topk_idx):
            with operation.on():
                weights = topk_weights.masked_fill(topk_idx < 0, 0)
        stream = operation.stream
        rows = routing.y if zero_copy else x
        defer = bool(return_recv_hook) and stream is not None
        step = Combining(routing, rows, weights, made, stream, defer)
        copies = is_copied(weights) or (rows is not None and is_copied(rows))
        moves = routing.seen is not routing.have
        operation.begin(step, torch_works=copies or moves)
        if return_recv_hook:
            return made, EventOverlap(), operation.later()
        return made, operation.finish(()), None

    def next_combine_buffer(self, handle: Any) -> Tensor:
        """y of the slot that the next combine uses, or rows that it copies there: a tensor of its own in each call, as
        the caller may give it a history."""
        routing = self._own_routing(handle)
        if routing is not None and routing.has_blocks_of_group:
            return routing.joined.regions(routing.turn.combine_slot()).y.detach()
        if routing is not None:
            if routing.y is None:
                routing.y = torch.empty(routing.y_shape, dtype=torch.bfloat16, device=self._groups.device)
            return routing.y.detach()
        foreign = Foreign(handle, self._groups.device, self._groups.size)
        self._next_rows = torch.empty(foreign.y_shape, dtype=torch.bfloat16, device=self._groups.device)
        return self._next_rows.detach()

    def meet(self) -> bool:
        """Waits for all ranks that live, if they have a group for it. Then no operation needs this rank any more."""
        groups = [joined for joined in self._groups.all() if joined.steps is not None]
        for joined in groups:
            with contextlib.suppress(epd.Error):  # whatever has become of this rank, it goes
                joined.settle()
        for joined in groups[:1]:
            with contextlib.suppress(epd.Error):
                assert joined.steps is not None
                meeting = Meeting(joined.group, joined.turns.next().slot)
                joined.steps.begin(joined, meeting)
                joined.steps.end(joined, meeting)
        return bool(groups)

    # ---- inside ------------------------------------------------------------------------------------

    def _own_routing(self, handle: Any) -> Optional[Routing]:
        """None: no group of this Buffer knows it."""
        routing = low_latency_routing(handle)
        if routing is None or not self._groups.has(routing.joined):
            return None
        if routing.generation != routing.joined.generation:
            raise refuse("handle", "of a dispatch before late ranks came back", "handles of later dispatches")
        return routing

    def _establish(
        self, foreign: Foreign, x: Tensor, topk_idx: Tensor, zero_copy: bool
    ) -> tuple[Tensor, Routing]:
        """Dispatches rows that nobody reads, so that this Buffer knows a routing. Returns the rows to combine, as they
        lie then. x may be where that dispatch writes to."""
        if zero_copy and self._next_rows is None:
            raise _unasked_rows()
        rows = self._next_rows if zero_copy else x.clone()
        assert rows is not None
        self._next_rows = None
        nothing = x.new_zeros((topk_idx.shape[0], foreign.hidden))
        experts, tokens = foreign.num_experts, foreign.tokens
        _, _, own, _, _ = self.dispatch(nothing, topk_idx, tokens, experts, BF16_ROWS, None, None, False, False)
        lies = (foreign.src_info, foreign.layout_range)
        return move_tokens(rows, lies, (own[0], own[1]), tokens), own.routing

    def _joined_for(
        self, x: Tensor, topk_idx: Tensor, tokens: int, num_experts: int, row_format: int
    ) -> tuple[Joined, int]:
        """The group of a dispatch, whose arguments are checked, and `tokens` as an int."""
        groups, arguments = self._groups, None
        if groups.replaced:
            groups.leave_unneeded(self._streams)
        numbers = isinstance(tokens, int) and isinstance(num_experts, int)  # 8.0 would be found as 8
        if numbers and isinstance(x, Tensor) and isinstance(topk_idx, Tensor):
            tensors = (x.shape, x.dtype, x.device, topk_idx.shape, topk_idx.dtype, topk_idx.device)
            arguments = (tensors, tokens, num_experts, row_format)
            joined = groups.of_arguments(arguments)
            if joined is not None:
                return joined, tokens
        tokens = check_number("num_max_dispatch_tokens_per_rank", tokens, 1, "1 or more")
        num_experts = check_number("num_experts", num_experts, 1, "1 or more")
        check_tensor("x", x, dtypes=torch.bfloat16, shape=(None, None), device=groups.device)
        n, hidden = x.shape
        if n > tokens:
            raise refuse("x.shape[0]", n, f"0 .. {tokens}, num_max_dispatch_tokens_per_rank")
        check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=(n, None), device=groups.device)
        shape = Shape(num_experts, hidden, topk_idx.shape[1], low_latency=True)
        joined = groups.low_latency(shape, tokens, self._streams)
        if arguments is not None:
            groups.remember(arguments, joined)
        return joined, tokens

    def _check_wait_stats(self, name: str, stats: Optional[Tensor]) -> None:
        if stats is not None:
            check_stats(name, stats, self._groups.size, self._groups.device, self._streams.capturing)

    def _results(
        self, joined: Joined, slot: int, row_format: int, tokens: int, masked: Optional[Tensor]
    ) -> Results:
        if not self._views or tokens != joined.size.tokens:
            return Results(joined, slot, row_format, tokens, False, masked)
        results: Optional[Results] = joined.results.get((slot, row_format))
        if results is None or results.touched():
            results = joined.results[slot, row_format] = Results(joined, slot, row_format, tokens, True)
        return results


def _unasked_rows() -> epd.Error:
    return refuse("zero_copy", True, "False, or after get_next_low_latency_combine_buffer with this handle")
