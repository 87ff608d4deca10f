"""One low-latency operation: what it reads, what it delivers, and how it is submitted."""

from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor

import epd
from epd.torch.staging import Staging

from .checks import refuse
from .groups import Joined
from .places import Routing, counts_in, layout_range, move
from .shrink import Attempt

Rows = Union[Tensor, tuple[Tensor, Tensor]]


_X, _TOPK_IDX, _TOPK_WEIGHTS = epd.Region.X, epd.Region.TOPK_IDX, epd.Region.TOPK_WEIGHTS
_Y, _EXPERT_COUNTS, _OUT = epd.Region.Y, epd.Region.EXPERT_COUNTS, epd.Region.OUT


def give_rows(memory: Staging, joined: Joined, region: epd.Region, of_slot: Tensor, rows: Tensor) -> None:
    """Inputs of an operation. One that may be repeated finds them in the slot, whatever has become of the caller's."""
    if joined.steps is None:
        memory.give(region, rows)
    else:
        of_slot[tuple(slice(size) for size in rows.shape)].copy_(rows)


class Results:
    """The outputs of a dispatch: views of the slot's regions, which are the same for each dispatch, or tensors of its
    own. The last two dimensions of scales lie column-major in both."""

    def __init__(
        self,
        joined: Joined,
        slot: int,
        row_format: int,
        tokens: int,
        views: bool,
        hidden: Optional[Tensor] = None,
    ) -> None:
        """tokens: of a rank, for which there is room; with views the group's. hidden: the caller does not get rows of
        these ranks [R] bool. Not with views."""
        b = joined.regions(slot, row_format)
        blocks, rows = b.recv_src.shape[0], b.recv_src.shape[1] // joined.size.tokens * tokens
        self._block_rows = rows
        self.row_format = row_format
        self._regions = b
        self._views = views
        self._keeps_counts = joined.steps is not None
        self._hidden = hidden
        self._range: Optional[Tensor] = None
        self._filled = False
        self._moved: Optional[list[tuple[Tensor, Tensor]]] = None  # rows, and how they are to be
        self._ranges = b.source_ranges if views else torch.empty_like(b.source_ranges)
        self._src = b.recv_src if views else b.recv_src.new_empty((blocks, rows, 2))
        self.x = b.recv_x.detach() if views else b.recv_x.new_empty((blocks, rows, b.recv_x.shape[2]))
        self.counts = b.expert_counts.detach() if views else torch.empty_like(b.expert_counts)
        self.sources = self._src[..., 1]
        self._scales: Optional[Tensor] = None
        self.scales: Optional[Tensor] = None
        if b.recv_scales is not None and views:
            self.scales = b.recv_scales.detach()
        elif b.recv_scales is not None:
            columns = b.recv_scales.new_empty((blocks, b.recv_scales.shape[2], -(-rows // 4) * 4))
            self._scales = columns.transpose(1, 2)[:, :rows]
            self.scales = self._scales.detach()
        self.rows: Rows = self.x if self.scales is None else (self.x, self.scales)
        self.torch_works = not views  # in `fill`
        self._versions = self._versions_now()

    def touched(self) -> bool:
        """Whether a caller has changed the tensors in place: their values, shapes, or history. Later callers get
        others. (resize_ is not seen.)"""
        scales = self.scales
        if self.x.requires_grad or (scales is not None and scales.requires_grad):
            return True
        return self._versions_now() != self._versions

    def _versions_now(self) -> tuple[int, ...]:
        scales = self.scales
        try:
            counted = (self.x._version, self.counts._version, self.sources._version)
            return counted if scales is None else (*counted, scales._version)
        except RuntimeError:  # tensors of inference mode have none
            return ()

    def want(self, memory: Staging) -> None:
        """Where the operation writes to."""
        if self._views:
            return
        memory.want(epd.Region.RECV_X, self.x)
        memory.want(epd.Region.RECV_SRC, self._src)
        memory.want(_EXPERT_COUNTS, self.counts)
        memory.want(epd.Region.SOURCE_RANGES, self._ranges)

    def fill(self, routing: Routing) -> None:
        """After the arrival, in the stream's order. If it is interrupted, the next call does all of it. routing: of the
        dispatch."""
        if self._views or self._filled:
            return
        if not self.counts.is_cuda and int(self.counts.max()) > self._block_rows:  # on a GPU the CPU would have to wait
            given = f"of {self._block_rows} rows in a block, and {int(self.counts.max())} have come"
            raise refuse("num_max_dispatch_tokens_per_rank", given, "the same number on all ranks")
        if self._scales is not None:
            assert self._regions.recv_scales is not None
            self._scales.copy_(self._regions.recv_scales[:, : self._block_rows])
        have = counts_in(self._ranges)
        seen = have if self._hidden is None else have.masked_fill(self._hidden, 0)
        self._range = layout_range(seen)
        if seen is not have:
            if self._moved is None:  # else this was interrupted
                given = (self.x, self._src, self._scales)
                self._moved = [(rows, move(rows, have, seen)) for rows in given if rows is not None]
            self.counts.copy_(seen.sum(1))
            for rows, moved in self._moved:
                rows.copy_(moved)
        if self._keeps_counts:
            routing.have, routing.seen = have, seen
        self._filled, self._moved = True, None

    def layout_range(self) -> Tensor:
        return layout_range(counts_in(self._ranges)) if self._range is None else self._range

    def own(self) -> list[Optional[Tensor]]:
        """Tensors that were made for this dispatch."""
        return [] if self._views else [self.x, self.counts, self._src, self._ranges, self.scales]


class Dispatching:
    """A dispatch."""

    __slots__ = ("_defer", "_inputs", "_results", "_routing", "_row_format", "stream")

    def __init__(
        self, routing: Routing, inputs: tuple[Tensor, Tensor], results: Results, stream: object, defer: bool
    ) -> None:
        self._inputs: Optional[tuple[Tensor, Tensor]] = inputs  # x, topk_idx
        self._results: Optional[Results] = results
        self._row_format = results.row_format
        self.stream = stream
        self._defer = defer
        self._routing = routing

    def submit(self, attempt: Attempt) -> epd.Ticket:
        memory = Staging(0 if self._routing.has_blocks_of_group else self._routing.y_shape[1])
        if attempt is Attempt.FIRST and self._inputs is not None:
            joined = self._routing.joined
            x = joined.regions(self._routing.turn.slot, self._row_format).x
            give_rows(memory, joined, _X, x, self._inputs[0])
            memory.give(_TOPK_IDX, self._inputs[1])
        if attempt is not Attempt.REPEAT and self._results is not None:
            self._results.want(memory)
        ticket = self._routing.joined.group.dispatch(
            self._routing.turn.slot,
            self._routing.num_tokens,
            stream=self.stream,
            omit_weights=True,
            defer_receive=self._defer and attempt is Attempt.FIRST,
            row_format=self._row_format,
            memory=memory,
        )
        self._routing.handle = ticket.handle
        return ticket

    def submitted(self) -> None:
        self._routing.joined.turns.dispatched(self._routing.turn)

    def completed(self) -> None:
        self._inputs = self._results = None

    def repeated(self) -> None:
        ranges = self._routing.joined.regions(self._routing.turn.slot).source_ranges
        assert ranges is not None
        self._routing.have = counts_in(ranges)


class Combining:
    """A combine. x is None if its rows are in the slot already."""

    __slots__ = ("_defer", "_lie", "_out", "_routing", "_slot", "_weights", "_x", "stream")

    def __init__(
        self,
        routing: Routing,
        x: Optional[Tensor],
        topk_weights: Tensor,
        out: Tensor,
        stream: object,
        defer: bool,
    ) -> None:
        self._slot = routing.turn.combine_slot()
        self._routing = routing
        self._x = x
        self._weights: Optional[Tensor] = topk_weights
        self._out: Optional[Tensor] = out
        self.stream = stream
        self._defer = defer
        self._lie = routing.seen  # how the rows in x, then those in the slot, lie

    def submit(self, attempt: Attempt) -> epd.Ticket:
        routing = self._routing
        assert routing.handle is not None
        rows, counts = self._x, routing.counts
        if attempt is not Attempt.FIRST:
            rows = None
        have = routing.have
        if self._lie is not have and self._lie is not None and have is not None:
            rows = move(routing.joined.regions(self._slot).y if rows is None else rows, self._lie, have)
            counts = have.sum(1).int()
        memory = Staging(0 if rows is None or routing.has_blocks_of_group else rows.shape[1])
        if attempt is Attempt.FIRST and self._weights is not None:
            memory.give(_TOPK_WEIGHTS, self._weights)
        if rows is not None:
            give_rows(memory, routing.joined, _Y, routing.joined.regions(self._slot).y, rows)
            memory.give(_EXPERT_COUNTS, counts)
        if attempt is not Attempt.REPEAT and self._out is not None:
            memory.want(_OUT, self._out)
        ticket = routing.joined.group.combine(
            self._slot,
            routing.handle,
            stream=self.stream,
            weighted=True,
            defer_receive=self._defer and attempt is Attempt.FIRST,
            memory=memory,
            num_tokens=routing.num_tokens,
        )
        self._lie = have
        return ticket

    def submitted(self) -> None:
        self._routing.joined.turns.combined(self._routing.turn)

    def completed(self) -> None:
        self._x = self._weights = self._out = None

    def repeated(self) -> None:
        pass


class Meeting:
    """A dispatch without tokens: it ends when all ranks that live have come."""

    def __init__(self, group: epd.Group, slot: int) -> None:
        self.stream: object = None
        self._group = group
        self._slot = slot

    def submit(self, attempt: Attempt) -> epd.Ticket:
        return self._group.dispatch(self._slot)

    def submitted(self) -> None:
        pass

    def completed(self) -> None:
        pass

    def repeated(self) -> None:
        pass
