"""Normal mode: one row for each (token, rank), by source rank, then token."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

import epd
from epd.torch.staging import Staging, is_copied

from .checks import check_kind, check_number, check_tensor, refuse
from .config import Config
from .dispatches import SLOT, Dispatches, NewDispatch
from .events import EventOverlap
from .given import Given, Rows, given_rows
from .groups import Groups, Joined, Shape
from .growth import FIRST_UNTOLD, MOST, NOTHING
from .handles import NormalRouting, Unused, normal_handle, normal_routing, unused_parts
from .layout import is_layout_of, one_expert_of_each_rank, tokens_in_ranks, without_dropped
from .streams import Call, Streams
from .team import Team

_RECEIVED = (
    epd.Region.RECV_X,
    epd.Region.RECV_SCALES,
    epd.Region.RECV_TOPK_IDX,
    epd.Region.RECV_TOPK_WEIGHTS,
    epd.Region.RECV_SRC,
)
_X, _X_SCALES, _Y, _OUT = epd.Region.X, epd.Region.X_SCALES, epd.Region.Y, epd.Region.OUT
_RECV_X, _RECV_SCALES = epd.Region.RECV_X, epd.Region.RECV_SCALES
_RANK_OFFSETS, _NO_WEIGHTS = epd.Region.RANK_OFFSETS, epd.ReturnWeights.NONE
_MOST_ROWS = (1 << 31) - 1


class _Received(NamedTuple):
    """Results of a dispatch, in the order of _RECEIVED."""

    x: Tensor  # opaque rows: as bytes, until `taken_apart`
    scales: Optional[Tensor]
    topk_idx: Optional[Tensor]
    topk_weights: Optional[Tensor]
    src: Optional[Tensor] = None

    def rows(self) -> Rows:
        return self.x if self.scales is None else (self.x, self.scales)

    def taken_apart(self, given: Given, call: Call) -> _Received:
        if given.opaque is None:
            return self
        with call.allocate():
            x, scales = given.opaque.room(self.x)
        given.opaque.unpack(self.x, x, scales)
        return self._replace(x=x, scales=scales)

    @property
    def sources(self) -> Tensor:
        """The token's number on its source rank."""
        assert self.src is not None
        return self.src[:, 1]

    def mark_unused(self) -> None:
        """As rows that no token fills stay."""
        for tensor in (self.topk_idx, self.src):
            if tensor is not None:
                tensor.fill_(-1)
        if self.topk_weights is not None:
            self.topk_weights.zero_()

    def copy_from(self, regions: epd.Buffers[Tensor]) -> None:
        """The rows that have come."""
        for region, target in zip(_RECEIVED, self):
            if target is not None:
                target.copy_(getattr(regions, region.name.lower())[: target.shape[0]])


class NormalMode:
    """The normal operations of a Buffer."""

    def __init__(self, team: Team, groups: Groups, streams: Streams) -> None:
        self._team = team
        self._groups = groups
        self._streams = streams
        self._dispatches = Dispatches(groups, streams)

    # ---- dispatch ----------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Rows,
        num_tokens_per_expert: Optional[Tensor],
        is_token_in_rank: Optional[Tensor],
        topk_idx: Optional[Tensor],
        topk_weights: Optional[Tensor],
        expert_alignment: int,
        num_worst_tokens: int,
        config: Config,
        call: Call,
    ) -> tuple[Rows, Optional[Tensor], Optional[Tensor], list[int], tuple[Tensor, ...], EventOverlap]:
        given = given_rows(x, self._groups.device)
        if num_tokens_per_expert is None:
            raise refuse("num_tokens_per_expert", None, "a tensor [num_experts] without a handle")
        check_kind("num_tokens_per_expert", num_tokens_per_expert, Tensor, "a tensor [num_experts]")
        self._check_worst(num_worst_tokens)
        self._check_choices(given, is_token_in_rank, topk_idx, topk_weights)
        counts: Optional[list[int]] = None
        in_rank = is_token_in_rank
        with call.run():
            if topk_idx is not None:
                chosen, num_experts = topk_idx, num_tokens_per_expert.numel()
            else:  # nobody says which expert: each rank stands for one
                assert in_rank is not None
                chosen, num_experts = one_expert_of_each_rank(in_rank), self._team.size
                if num_worst_tokens == 0:
                    counts = self._caller_counts(num_tokens_per_expert)
            num_tokens, topk = chosen.shape
            joined = self._group_of(given.shape(num_experts, topk), num_tokens, num_worst_tokens)
            if topk_idx is not None and in_rank is not None and not is_layout_of(in_rank, topk_idx):
                chosen, in_rank = without_dropped(topk_idx, in_rank, num_experts), None
            offsets = self._new(call, (self._team.size + 1,), torch.int32)
            received: Optional[_Received] = None
            if num_worst_tokens > 0:
                received = self._make(joined, given, call, num_worst_tokens, topk_idx is not None)
                received.mark_unused()
            staging = self._staging_of_rows(given, num_worst_tokens)
            for region, target in zip(_RECEIVED, received or ()):
                if target is not None:
                    staging.want(region, target)
            staging.give(epd.Region.TOPK_IDX, chosen)
            if topk_weights is not None:
                staging.give(epd.Region.TOPK_WEIGHTS, topk_weights)
            staging.want(_RANK_OFFSETS, offsets)
            new = NewDispatch(given, num_tokens, call, self._sms(config), topk_weights is None, staging)
            if received is not None:
                ticket = self._dispatches.unheard(joined, new)
            else:
                joined, ticket, known = self._dispatches.heard(joined, new)
                counts = list(known.expert_counts) if counts is None else counts
            self._end(ticket)
            if received is None:
                received = self._make(joined, given, call, known.num_recv_rows, topk_idx is not None)
                received.copy_from(joined.regions(SLOT, given.row_format))
            num_rows, packed = len(received.x), None if given.opaque is None else received.x
            received = received.taken_apart(given, call)
            known_ranks = in_rank is not None
            if in_rank is None:
                in_rank = self._new(call, (num_tokens, self._team.size), torch.bool)
                in_rank.copy_(tokens_in_ranks(chosen, num_experts, self._team.size))
        routing = NormalRouting(in_rank, num_tokens, num_experts, topk, num_rows)
        routing.offsets, routing.handles[joined] = offsets, ticket.handle
        handle = normal_handle(routing, received.sources, self._team.size, self._unused_parts_of(joined))
        inputs = [given.x, given.scales, chosen, topk_weights, packed]
        if chosen is not topk_idx:
            inputs += [topk_idx, is_token_in_rank]
        event = call.end(inputs, [*received, offsets, None if known_ranks else in_rank])
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts or ()]
        return received.rows(), received.topk_idx, received.topk_weights, aligned, handle, event

    def dispatch_again(
        self, x: Rows, handle: Any, config: Config, call: Call
    ) -> tuple[Rows, EventOverlap]:
        """The rows of x under the routing of a handle."""
        given = given_rows(x, self._groups.device)
        routing = self._routing_of(handle)
        if given.x.shape[0] != routing.num_tokens:
            raise refuse("x.shape[0]", given.x.shape[0], f"{routing.num_tokens}, as of the handle's dispatch")
        joined = self._group_for(routing, given.shape(routing.num_experts, routing.topk))
        known, scales = routing.handles.get(joined), given.scales
        copies = given.opaque is not None or is_copied(given.x) or (scales is not None and is_copied(scales))
        made: Sequence[Tensor] = ()
        with call.run(torch_works=copies or known is None):
            received = self._make(joined, given, call, routing.num_rows)
            staging = self._staging_of_rows(given, 0 if known is not None else routing.num_rows)
            staging.want(_RECV_X, received.x)
            if received.scales is not None:
                staging.want(_RECV_SCALES, received.scales)
            if known is None:  # the first such rows under the handle
                joined, *made = self._establish(routing, joined, given, call, config, staging)
            else:
                self._end(self._submit_again(joined, given, known, call, config, staging))
            packed = None if given.opaque is None else received.x
            received = received.taken_apart(given, call)
        event = call.end((given.x, scales, packed, *made), (received.x, received.scales, *made))
        return received.rows(), event

    def _establish(
        self,
        routing: NormalRouting,
        joined: Joined,
        given: Optional[Given],
        call: Call,
        config: Config,
        staging: Staging,
    ) -> tuple[Joined, Tensor, Tensor]:
        """A dispatch that makes the routing known to a group. given None: of rows that nobody reads. Returns the group,
        or the larger one in its place, and the tensors that the dispatch uses."""
        chosen = routing.topk_idx(joined.shape.topk)
        staging.give(epd.Region.TOPK_IDX, chosen)
        offsets = routing.offsets
        if offsets is None:
            offsets = self._new(call, (self._team.size + 1,), torch.int32)
            staging.want(_RANK_OFFSETS, offsets)
        new = NewDispatch(given, routing.num_tokens, call, self._sms(config), True, staging)
        if self._streams.capturing:
            ticket = self._dispatches.unheard(joined, new)
        else:
            joined, ticket, _ = self._dispatches.heard(joined, new)
        self._end(ticket)
        routing.offsets, routing.handles[joined] = offsets, ticket.handle  # not before the dispatch has told them
        return joined, chosen, offsets

    def _group_of(self, shape: Shape, num_tokens: int, num_worst_tokens: int) -> Joined:
        """The group of a dispatch."""
        least = NOTHING
        if num_worst_tokens > 0 and not self._streams.capturing:
            least = FIRST_UNTOLD.for_tokens(min(-(-num_worst_tokens // self._team.size), MOST.tokens))
        joined = self._groups.normal(shape, self._streams, least)
        if num_worst_tokens > 0 and num_tokens > joined.size.tokens:
            allowed = f"0 .. {joined.size.tokens} with num_worst_tokens {num_worst_tokens} of {self._team.size} ranks"
            raise refuse("x.shape[0]", num_tokens, allowed)
        return joined

    def _submit_again(
        self, joined: Joined, given: Given, known: epd.Handle, call: Call, config: Config, staging: Staging
    ) -> epd.Dispatch:
        joined.captured = joined.captured or self._streams.capturing
        return joined.submit(
            joined.group.dispatch,
            SLOT,
            given.x.shape[0],
            handle=known,
            stream=call.stream,
            omit_weights=True,
            sms=self._sms(config),
            row_format=given.row_format,
            memory=staging,
        )

    def _staging_of_rows(self, given: Given, recv_rows: int = 0) -> Staging:
        """recv_rows: for which there is room; 0: exactly as many as will come."""
        staging = Staging(recv_rows)
        if given.opaque is not None:
            staging.give(_X, given.opaque.pack(given.x, given.scales))
            return staging
        staging.give(_X, given.x)
        if given.scales is not None:
            staging.give(_X_SCALES, given.scales)
        return staging

    def _make(
        self, joined: Joined, given: Given, call: Call, num_rows: int, chosen: Optional[bool] = None
    ) -> _Received:
        """Tensors for the results. chosen None: under a handle, for the rows alone; False: without topk_idx."""
        b = joined.regions(SLOT, given.row_format)
        with call.allocate():
            recv_x = self._groups.rows((num_rows, b.recv_x.shape[1]), b.recv_x.dtype)
            scales = None if b.recv_scales is None else _like(b.recv_scales, num_rows)
            if chosen is None:
                return _Received(recv_x, scales, None, None)
            return _Received(
                recv_x,
                scales,
                _like(b.recv_topk_idx, num_rows) if chosen else None,
                _like(b.recv_topk_weights, num_rows) if chosen else None,
                _like(b.recv_src, num_rows),
            )

    def _new(self, call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with call.allocate():
            return torch.empty(shape, dtype=dtype, device=self._groups.device)

    # ---- combine -----------------------------------------------------------------------------------

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Optional[Tensor],
        biases: Sequence[Tensor],
        config: Config,
        call: Call,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        routing, device = self._routing_of(handle), self._groups.device
        n, rows = routing.num_tokens, routing.num_rows
        check_tensor("x", x, dtypes=torch.bfloat16, shape=(rows, None), device=device)
        hidden = x.shape[1]
        columns = 0
        if topk_weights is not None:
            check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=(rows, None), device=device)
            columns = topk_weights.shape[1]
        for number, bias in enumerate(biases):
            name = f"bias[{number}]"
            check_tensor(name, bias, dtypes=torch.bfloat16, shape=(n, hidden), device=device)
        shape = Shape(routing.num_experts, hidden, max(routing.topk, columns))
        joined = self._group_for(routing, shape, any_rows=True)
        known, topk = joined in routing.handles, joined.shape.topk
        inputs = (x, topk_weights, *biases)
        copies = any(each is not None and is_copied(each) for each in inputs) or columns not in (0, topk)
        made: Sequence[Tensor] = ()
        with call.run(torch_works=copies or not known):
            with call.allocate():
                out = self._groups.rows((n, hidden), torch.bfloat16)
            if not known:
                joined, *made = self._establish(routing, joined, None, call, config, Staging())
            staging = Staging(rows)
            staging.give(_Y, x)
            assert routing.offsets is not None
            staging.give(_RANK_OFFSETS, routing.offsets)
            for region, bias in zip((epd.Region.BIAS_0, epd.Region.BIAS_1), biases):
                staging.give(region, bias)
            staging.want(_OUT, out)
            weights, kind = None, _NO_WEIGHTS
            if topk_weights is not None:
                given = torch.nn.functional.pad(topk_weights, (0, topk - columns)) if columns < topk else topk_weights
                made = (*made, given)
                weights, kind = self._new(call, (n, topk), torch.float32), epd.ReturnWeights.SUM
                staging.give(epd.Region.Y_WEIGHTS, given)
                staging.want(epd.Region.OUT_WEIGHTS, weights)
            joined.captured = joined.captured or self._streams.capturing
            ticket = joined.submit(
                joined.group.combine,
                SLOT,
                routing.handles[joined],
                stream=call.stream,
                num_biases=len(biases),
                return_weights=kind,
                sms=self._sms(config),
                memory=staging,
                num_tokens=n,
            )
            self._end(ticket)
            if weights is not None and columns < topk:
                weights = weights[:, :columns].contiguous()
        return out, weights, call.end((*inputs, routing.offsets, *made), (out, weights, *made))

    def _group_for(self, routing: NormalRouting, shape: Shape, any_rows: bool = False) -> Joined:
        """One that knows the routing already, if there is any. any_rows: of a combine, whatever was dispatched; shape
        has as many choices as there are columns of weights, at least."""
        for joined in routing.handles:
            has = joined.shape
            fits = has == shape or (any_rows and has.hidden == shape.hidden and has.topk >= shape.topk)
            if fits and self._groups.has(joined):
                return joined
        return self._groups.normal(shape, self._streams)

    # ---- checks ------------------------------------------------------------------------------------

    def _check_worst(self, num_worst_tokens: int) -> None:
        allowed = f"0 (as many as come), or 1 .. {_MOST_ROWS}"
        if check_number("num_worst_tokens", num_worst_tokens, 0, allowed) > _MOST_ROWS:
            raise refuse("num_worst_tokens", num_worst_tokens, allowed)
        if num_worst_tokens == 0 and self._streams.capturing:
            raise refuse("num_worst_tokens", 0, "1 or more while the stream captures a graph: nothing may wait")

    def _check_choices(
        self, given: Given, in_rank: Optional[Tensor], topk_idx: Optional[Tensor], topk_weights: Optional[Tensor]
    ) -> None:
        n, device, ranks = given.x.shape[0], self._groups.device, self._team.size
        if in_rank is not None or topk_idx is None:
            check_tensor("is_token_in_rank", in_rank, dtypes=torch.bool, shape=(n, ranks), device=device)
        if topk_idx is None:
            if ranks > 32:
                raise refuse("topk_idx", None, f"a tensor in a group of {ranks} ranks; none up to 32 ranks")
            return
        check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=(n, None), device=device)
        if topk_weights is None:
            raise refuse("topk_weights", None, "a tensor with topk_idx")
        shape = tuple(topk_idx.shape)
        check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=shape, device=device)

    def _routing_of(self, handle: Any) -> NormalRouting:
        return normal_routing(handle, self._groups.device, self._team.size)

    def _unused_parts_of(self, joined: Joined) -> Unused:
        if joined.unused is None:
            shape = joined.shape
            joined.unused = unused_parts(self._team.size, shape.num_experts, shape.topk, self._groups.device)
        return joined.unused

    def _caller_counts(self, num_tokens_per_expert: Tensor) -> list[int]:
        """Rows of each local expert, as the callers of all ranks say."""
        local = num_tokens_per_expert.numel() // self._team.size
        begin = self._team.rank * local
        everywhere = self._team.gather(num_tokens_per_expert.tolist())
        return [sum(each) for each in zip(*(counts[begin : begin + local] for counts in everywhere))]

    def _sms(self, config: Config) -> int:
        return 0 if self._groups.on_host else config.num_sms

    def _end(self, ticket: epd.Ticket) -> None:
        if self._groups.on_host:
            ticket.wait()


def _like(region: Tensor, num_rows: int) -> Tensor:
    return torch.empty((num_rows, *region.shape[1:]), dtype=region.dtype, device=region.device)
