"""Low-latency mode: each expert's rows in a block of its own, in two slots that take turns."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, ContextManager, NamedTuple, Optional

import torch
from torch import Tensor

import epd

from .checks import check_tensor, refuse
from .events import EventHandle, EventOverlap
from .groups import Groups, Joined, Shape
from .handles import LowLatencyHandle
from .masks import Masks, without
from .operations import Combining, Dispatching, Meeting, Results, Rows
from .shrink import Attempt, Step, Steps
from .streams import Call, Streams
from .waits import WaitStats, check_stats

Hook = Callable[[], None]


class _Place(NamedTuple):
    """Where an operation runs."""

    stream: object  # None on host devices
    call: Optional[Call]  # on the Buffer's own stream
    steps: Optional[Steps]  # what repeats it; None: nothing

    @property
    def cpu_waits(self) -> bool:
        return self.stream is None or self.steps is not None


class _Run:
    """An operation in flight."""

    def __init__(self, joined: Joined, step: Step, place: _Place) -> None:
        self._steps = place.steps
        if self._steps is None:
            self._ticket = joined.submit(lambda: step.submit(joined, Attempt.FIRST))
        else:
            self._joined, self._step = joined, step
            self._ticket = self._steps.begin(joined, step)

    def end(self) -> None:
        """The CPU waits."""
        if self._steps is None:
            self._ticket.wait()
        else:
            self._steps.end(self._joined, self._step, self._ticket)

    def receive(self, stream: object) -> None:
        """The stream waits for the arrival."""
        self._ticket.wait_on_stream(stream)
        if self._steps is not None:
            self._step.stream = stream  # if it must be made again


class LowLatencyMode:
    """The low-latency operations of a Buffer. masks: None, if it has no enable_shrink."""

    def __init__(self, groups: Groups, streams: Streams, masks: Optional[Masks]) -> None:
        self._groups = groups
        self._streams = streams
        self._masks = masks
        self._views = os.environ.get("EPD_DEEPEP_VIEWS", "1") != "0" and masks is None

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        tokens: int,
        num_experts: int,
        payload: epd.Payload,
        scale_format: epd.ScaleFormat,
        stats: Optional[Tensor],
        wait_stats: Optional[Tensor],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Optional[Hook]]:
        device = self._groups.device
        check_tensor("x", x, dtypes=torch.bfloat16, shape=(None, None), device=device)
        n, hidden = x.shape
        if n > tokens:
            raise refuse("x.shape[0]", n, f"0 .. {tokens}, num_max_dispatch_tokens_per_rank")
        check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=(n, None), device=device)
        self._check_wait_stats("dispatch_wait_recv_cost_stats", wait_stats)
        shape = Shape(payload, scale_format, num_experts, hidden, topk_idx.shape[1], tokens)
        joined = self._groups.low_latency(shape, self._streams)
        local = joined.regions(0).expert_counts.shape
        if stats is not None:
            check_tensor(
                "cumulative_local_expert_recv_stats", stats, dtypes=torch.int32, shape=local, device=device
            )
        place = self._begin(joined, async_finish)
        waited = self._wait_stats(joined, wait_stats, place)
        slot = joined.next_slot()
        masked = None if self._masks is None else self._masks.hidden
        results = Results(joined, slot, self._views, masked)
        with _on(place):
            chosen = topk_idx if masked is None else without(masked, topk_idx, num_experts)
            defer = return_recv_hook and place.stream is not None
            run = _Run(joined, Dispatching(slot, x, chosen, results, place.stream, defer), place)

        def arrive() -> None:
            results.fill()
            if stats is not None:
                stats.add_(results.counts)
            if waited is not None:
                waited.add()

        handle = LowLatencyHandle(
            joined, results.routing, n, results.counts, results.sources, results.layout_range
        )
        inputs = [x, topk_idx, stats, wait_stats]
        event, hook = self._finish(joined, run, place, arrive, return_recv_hook, inputs, results.own())
        return results.rows(), results.counts, handle, event, hook

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        zero_copy: bool,
        async_finish: bool,
        return_recv_hook: bool,
        out: Optional[Tensor],
        wait_stats: Optional[Tensor],
    ) -> tuple[Tensor, EventOverlap, Optional[Hook]]:
        device, joined = self._groups.device, handle.joined
        shape, n = joined.shape, handle.num_tokens
        weights_shape = (n, shape.topk)
        check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=weights_shape, device=device)
        check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=weights_shape, device=device)
        y = joined.regions(joined.slot).y
        check_tensor("x", x, dtypes=torch.bfloat16, shape=tuple(y.shape), device=device)
        if out is not None:
            check_tensor("out", out, dtypes=torch.bfloat16, shape=(n, shape.hidden), device=device)
        self._check_wait_stats("combine_wait_recv_cost_stats", wait_stats)
        place = self._begin(joined, async_finish)
        waited = self._wait_stats(joined, wait_stats, place)
        slot = joined.next_slot()
        if out is None:
            out = torch.empty((n, shape.hidden), dtype=torch.bfloat16, device=device)
        with _on(place):
            rows = None if zero_copy else x
            defer = return_recv_hook and place.stream is not None
            run = _Run(joined, Combining(slot, handle, rows, topk_weights, out, place.stream, defer), place)
        inputs = [x, topk_idx, topk_weights, out, wait_stats]
        arrive = _nothing if waited is None else waited.add
        event, hook = self._finish(joined, run, place, arrive, return_recv_hook, inputs, [])
        return out, event, hook

    def next_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """y of the slot that the next combine uses."""
        return handle.joined.regions(handle.joined.slot).y

    def meet(self) -> bool:
        """Waits for all ranks that live, if they have a group for it. Then no operation needs this rank any more."""
        groups = [joined for joined in self._groups.all() if joined.steps is not None]
        for joined in groups:
            with contextlib.suppress(epd.Error):  # whatever has become of this rank, it goes
                joined.settle()
        for joined in groups[:1]:
            with contextlib.suppress(epd.Error):
                _Run(joined, Meeting(joined.next_slot()), _Place(None, None, joined.steps)).end()
        return bool(groups)

    # ---- inside ------------------------------------------------------------------------------------

    def _check_wait_stats(self, name: str, stats: Optional[Tensor]) -> None:
        check_stats(name, stats, self._groups.size, self._groups.device, self._streams.capturing)

    def _wait_stats(self, joined: Joined, stats: Optional[Tensor], place: _Place) -> Optional[WaitStats]:
        return None if stats is None else WaitStats(joined, stats, apart=place.cpu_waits)

    def _begin(self, joined: Joined, async_finish: bool) -> _Place:
        """On the Buffer's own stream if nobody waits for the end, else on the current one."""
        joined.settle()
        steps = None if self._streams.capturing else joined.steps
        if self._groups.on_host:
            return _Place(None, None, steps)
        if async_finish:
            call = self._streams.call(async_finish=True)
            return _Place(call.stream, call, steps)
        stream = self._streams.current()
        self._streams.order(stream)
        return _Place(stream, None, steps)

    def _finish(
        self,
        joined: Joined,
        run: _Run,
        place: _Place,
        arrive: Hook,
        return_recv_hook: bool,
        inputs: list[Optional[Tensor]],
        outputs: list[Optional[Tensor]],
    ) -> tuple[EventOverlap, Optional[Hook]]:
        if return_recv_hook:
            hook = self._hook(run, arrive, place, inputs)
            if place.cpu_waits:
                joined.remember(hook)
            return EventOverlap(), hook
        with _on(place):
            if place.cpu_waits:
                run.end()
            arrive()
        if place.call is not None:
            return place.call.end(inputs, outputs), None
        return EventOverlap(EventHandle() if place.stream is None else None), None

    def _hook(self, run: _Run, arrive: Hook, place: _Place, inputs: list[Optional[Tensor]]) -> Hook:
        """Makes the current stream wait for the arrival; the CPU, if it has to. Once."""
        waiting = [inputs]  # which the operation may still read

        def hook() -> None:
            if not waiting:
                return
            waiting.clear()
            if place.stream is not None:
                run.receive(self._streams.current())
            if place.cpu_waits:
                run.end()
            arrive()

        return hook


def _nothing() -> None:
    pass


_HERE = contextlib.nullcontext()


def _on(place: _Place) -> ContextManager[None]:
    """The operation's stream is torch's current one."""
    return _HERE if place.call is None else place.call.run()
