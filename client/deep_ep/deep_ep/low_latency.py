"""Low-latency mode: each expert's rows in a block of its own, in two slots that take turns."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, ContextManager, NamedTuple, Optional, Union

import torch
from torch import Tensor

import epd
from epd.torch.staging import Staging

from .checks import check_tensor, refuse
from .events import EventHandle, EventOverlap
from .groups import Groups, Joined, Shape
from .handles import LowLatencyHandle, layout_range
from .streams import Call, Streams

Rows = Union[Tensor, tuple[Tensor, Tensor]]
Hook = Callable[[], None]


class _Place(NamedTuple):
    """Where an operation runs."""

    stream: object  # None on host devices
    call: Optional[Call]  # on the Buffer's own stream


class LowLatencyMode:
    """The low-latency operations of a Buffer.

    The slot changes with every dispatch and every combine. So a pair leaves it as it was: a rank that replays a
    graph and a rank that runs eagerly use the same slots.
    """

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self._groups = groups
        self._streams = streams
        self._slot = 0
        self._views = os.environ.get("EPD_DEEPEP_VIEWS", "1") != "0"

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        tokens: int,
        num_experts: int,
        payload: epd.Payload,
        scale_format: epd.ScaleFormat,
        stats: Optional[Tensor],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Optional[Hook]]:
        device = self._groups.device
        check_tensor("x", x, dtypes=torch.bfloat16, shape=(None, None), device=device)
        n, hidden = x.shape
        if n > tokens:
            raise refuse("x.shape[0]", n, f"0 .. {tokens}, num_max_dispatch_tokens_per_rank")
        check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=(n, None), device=device)
        shape = Shape(payload, scale_format, num_experts, hidden, topk_idx.shape[1], tokens)
        joined = self._groups.low_latency(shape, self._streams)
        local = joined.regions(0).expert_counts.shape
        if stats is not None:
            check_tensor(
                "cumulative_local_expert_recv_stats", stats, dtypes=torch.int32, shape=local, device=device
            )
        slot = self._next_slot()
        place = self._begin(async_finish)
        results = _Results(joined, slot, self._views)
        with _on(place):
            staging = Staging()
            staging.give(epd.Region.X, x)
            staging.give(epd.Region.TOPK_IDX, topk_idx)
            ticket = joined.submit(
                lambda: joined.group.dispatch(
                    slot,
                    n,
                    stream=place.stream,
                    omit_weights=True,
                    defer_receive=return_recv_hook and place.stream is not None,
                    memory=staging,
                )
            )

        def arrive() -> None:
            results.fill()
            if stats is not None:
                stats.add_(results.counts)

        handle = LowLatencyHandle(joined, ticket.handle, n, results.counts, results.sources, results.layout_range)
        event, hook = self._finish(
            joined, ticket, place, arrive, return_recv_hook, [x, topk_idx, stats], results.own()
        )
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
    ) -> tuple[Tensor, EventOverlap, Optional[Hook]]:
        device, joined = self._groups.device, handle.joined
        shape, n = joined.shape, handle.num_tokens
        weights_shape = (n, shape.topk)
        check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=weights_shape, device=device)
        check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=weights_shape, device=device)
        y = joined.regions(self._slot).y
        check_tensor("x", x, dtypes=torch.bfloat16, shape=tuple(y.shape), device=device)
        if out is not None:
            check_tensor("out", out, dtypes=torch.bfloat16, shape=(n, shape.hidden), device=device)
        slot = self._next_slot()
        place = self._begin(async_finish)
        if out is None:
            out = torch.empty((n, shape.hidden), dtype=torch.bfloat16, device=device)
        with _on(place):
            staging = Staging()
            staging.give(epd.Region.TOPK_WEIGHTS, topk_weights)
            if not zero_copy:
                staging.give(epd.Region.Y, x)
                staging.give(epd.Region.EXPERT_COUNTS, handle.counts)
            staging.want(epd.Region.OUT, out)
            ticket = joined.submit(
                lambda: joined.group.combine(
                    slot,
                    handle.routing,
                    stream=place.stream,
                    weighted=True,
                    defer_receive=return_recv_hook and place.stream is not None,
                    memory=staging,
                    num_tokens=n,
                )
            )
        inputs = [x, topk_idx, topk_weights, out]
        event, hook = self._finish(joined, ticket, place, _nothing, return_recv_hook, inputs, [])
        return out, event, hook

    def next_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """y of the slot that the next combine uses."""
        return handle.joined.regions(self._slot).y

    # ---- inside ------------------------------------------------------------------------------------

    def _next_slot(self) -> int:
        slot = self._slot
        self._slot ^= 1
        return slot

    def _begin(self, async_finish: bool) -> _Place:
        """On the Buffer's own stream if nobody waits for the end, else on the current one."""
        if self._groups.on_host:
            return _Place(None, None)
        if async_finish:
            call = self._streams.call(async_finish=True)
            return _Place(call.stream, call)
        stream = self._streams.current()
        self._streams.order(stream)
        return _Place(stream, None)

    def _finish(
        self,
        joined: Joined,
        ticket: epd.Ticket,
        place: _Place,
        arrive: Hook,
        return_recv_hook: bool,
        inputs: list[Optional[Tensor]],
        outputs: list[Optional[Tensor]],
    ) -> tuple[EventOverlap, Optional[Hook]]:
        if return_recv_hook:
            hook = self._hook(ticket, arrive, inputs)
            if place.stream is None:
                joined.remember(hook)
            return EventOverlap(), hook
        if place.stream is None:
            ticket.wait()
        with _on(place):
            arrive()
        if place.call is not None:
            return place.call.end(inputs, outputs), None
        return EventOverlap(EventHandle() if place.stream is None else None), None

    def _hook(self, ticket: epd.Ticket, arrive: Hook, inputs: list[Optional[Tensor]]) -> Hook:
        """Makes the current stream wait for the arrival; on host devices waits for it. Once."""
        waiting = [inputs]  # which the operation may still read

        def hook() -> None:
            if not waiting:
                return
            waiting.clear()
            stream = self._streams.current()
            if stream is None:
                ticket.wait()
            else:
                ticket.wait_on_stream(stream)
            arrive()

        return hook


def _nothing() -> None:
    pass


class _Results:
    """What a dispatch has delivered: views of the slot's regions, or copies of them. Scales are always copied, as
    their last two dimensions lie column-major."""

    def __init__(self, joined: Joined, slot: int, views: bool) -> None:
        b = joined.regions(slot)
        self._regions = b
        self._views = views
        self.x = b.recv_x if views else torch.empty_like(b.recv_x)
        self.counts = b.expert_counts if views else torch.empty_like(b.expert_counts)
        sources = b.recv_src[..., 1]
        self.sources = sources if views else torch.empty(sources.shape, dtype=sources.dtype, device=sources.device)
        self.scales: Optional[Tensor] = None
        if b.recv_scales is not None:
            columns = joined.scale_columns(slot)
            self.scales = columns if views else torch.empty_like(columns)
        self._range: Optional[Tensor] = None

    def fill(self) -> None:
        """After the arrival, in the stream's order."""
        b = self._regions
        if self.scales is not None and b.recv_scales is not None:
            self.scales.copy_(b.recv_scales)
        if not self._views:
            self.x.copy_(b.recv_x)
            self.counts.copy_(b.expert_counts)
            self.sources.copy_(b.recv_src[..., 1])
            self._range = self._layout_range()

    def rows(self) -> Rows:
        return self.x if self.scales is None else (self.x, self.scales)

    def layout_range(self) -> Tensor:
        return self._layout_range() if self._range is None else self._range

    def own(self) -> list[Optional[Tensor]]:
        """Tensors that were made for this dispatch."""
        return [] if self._views else [self.x, self.counts, self.sources, self.scales]

    def _layout_range(self) -> Tensor:
        ranges = self._regions.source_ranges
        assert ranges is not None
        return layout_range(ranges, self._regions.recv_x.shape[1])


_HERE = contextlib.nullcontext()


def _on(place: _Place) -> ContextManager[None]:
    """The operation's stream is torch's current one."""
    return _HERE if place.call is None else place.call.run()
