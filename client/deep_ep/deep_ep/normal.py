"""Normal mode: one row for each (token, rank), by source rank, then token."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

import epd
from epd.torch import E4M3
from epd.torch.staging import Staging

from .checks import check_tensor, refuse
from .config import Config, max_tokens
from .events import EventOverlap
from .groups import Groups, Joined, Shape
from .handles import Choices, NormalHandle
from .layout import one_expert_of_each_rank
from .streams import Call, Streams
from .team import Team

Rows = Union[Tensor, tuple[Tensor, Tensor]]
SUMMED_OVER_RANKS = 2  # return_weights of epd_combine
_SLOT = 0


class Given(NamedTuple):
    """x of a call."""

    x: Tensor  # [n, H] bf16 or e4m3
    scales: Optional[Tensor]  # [n, S] of e4m3
    payload: epd.Payload
    scale_format: epd.ScaleFormat

    def shape(self, num_experts: int, topk: int) -> Shape:
        return Shape(self.payload, self.scale_format, num_experts, self.x.shape[1], topk)


class NormalMode:
    """The normal operations of a Buffer."""

    def __init__(self, team: Team, groups: Groups, streams: Streams) -> None:
        self._team = team
        self._groups = groups
        self._streams = streams
        self._sums_weights = True  # whether libepd adds weights up over ranks

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
    ) -> tuple[Rows, Optional[Tensor], Optional[Tensor], list[int], NormalHandle, EventOverlap]:
        given = self._given(x)
        if num_tokens_per_expert is None:
            raise refuse("num_tokens_per_expert", None, "a tensor [num_experts] without a handle")
        if num_worst_tokens == 0 and self._streams.capturing:
            raise refuse("num_worst_tokens", 0, "1 or more while the stream captures a graph: nothing may wait")
        num_experts = num_tokens_per_expert.numel()
        counts: Optional[list[int]] = None
        with call.run():
            if topk_idx is not None:
                choices = Choices(self._checked_idx(given, topk_idx), num_experts)
                self._check_weights(given, topk_idx, topk_weights)
            else:
                choices = self._choices_of_layout(given, is_token_in_rank)
                if num_worst_tokens == 0:
                    counts = self._caller_counts(num_tokens_per_expert)
            joined = self._groups.normal(given.shape(choices.num_experts, choices.topk), self._streams)
            ticket = self._submit(joined, given, call, config, choices, topk_weights, num_worst_tokens > 0)
            if num_worst_tokens == 0:
                known = ticket.counts()
                num_rows = known.num_recv_rows
                counts = list(known.expert_counts) if counts is None else counts
            else:
                num_rows = num_worst_tokens
            self._end(ticket)
            received = self._received(joined, call, given, num_rows, topk_idx is not None)
            prefix = self._handle_fields(joined, call, num_rows, is_token_in_rank)
        handle = NormalHandle(joined, ticket.handle, choices, num_rows, prefix)
        outputs = [*received, *(field for field in prefix if field is not is_token_in_rank)]
        inputs = [given.x, given.scales, choices.topk_idx(), topk_weights]
        event = call.end(inputs, outputs)
        recv_x, recv_scales, recv_idx, recv_weights = received
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts or ()]
        rows = recv_x if recv_scales is None else (recv_x, recv_scales)
        return rows, recv_idx, recv_weights, aligned, handle, event

    def dispatch_again(
        self, x: Rows, handle: NormalHandle, config: Config, call: Call
    ) -> tuple[Rows, EventOverlap]:
        """The rows of x under the routing of a handle."""
        given = self._given(x)
        if given.x.shape[0] != handle.num_tokens:
            raise refuse("x.shape[0]", given.x.shape[0], f"{handle.num_tokens}, as of the handle's dispatch")
        with call.run():
            choices = handle.choices
            joined = self._groups.normal(given.shape(choices.num_experts, choices.topk), self._streams)
            ticket = self._submit_again(joined, given, call, config, handle)
            self._end(ticket)
            recv_x, recv_scales, _, _ = received = self._received(joined, call, given, handle.num_rows, False)
        event = call.end([given.x, given.scales], received)
        return recv_x if recv_scales is None else (recv_x, recv_scales), event

    def _submit(
        self,
        joined: Joined,
        given: Given,
        call: Call,
        config: Config,
        choices: Choices,
        topk_weights: Optional[Tensor],
        mark_unused: bool,
    ) -> epd.Dispatch:
        staging = self._give_rows(joined, given)
        staging.give(epd.Region.TOPK_IDX, choices.topk_idx())
        if topk_weights is not None:
            staging.give(epd.Region.TOPK_WEIGHTS, topk_weights)
        return joined.submit(
            lambda: joined.group.dispatch(
                _SLOT,
                choices.num_tokens,
                stream=call.stream,
                omit_weights=topk_weights is None,
                keep_handle=True,
                mark_unused=mark_unused,
                sms=self._sms(config),
                **staging.keywords,
            )
        )

    def _submit_again(
        self, joined: Joined, given: Given, call: Call, config: Config, handle: NormalHandle
    ) -> epd.Dispatch:
        routing = handle.routings.get(joined.shape)
        if routing is None:  # rows of another type than the handle's dispatch had: the first ones under it
            ticket = self._submit(joined, given, call, config, handle.choices, None, False)
            handle.routings[joined.shape] = ticket.handle
            return ticket
        staging = self._give_rows(joined, given)
        return joined.submit(
            lambda: joined.group.dispatch(
                _SLOT,
                handle=routing,
                stream=call.stream,
                omit_weights=True,
                sms=self._sms(config),
                **staging.keywords,
            )
        )

    def _give_rows(self, joined: Joined, given: Given) -> Staging:
        staging = Staging(joined.group, _SLOT)
        staging.give(epd.Region.X, given.x)
        if given.scales is not None:
            staging.give(epd.Region.X_SCALES, given.scales)
        return staging

    def _received(
        self, joined: Joined, call: Call, given: Given, num_rows: int, chosen: bool
    ) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
        """Copies of the first num_rows rows, and of their scales, topk_idx and topk_weights."""
        b = joined.regions(_SLOT)
        room = b.recv_x.shape[0]
        regions = (
            b.recv_x,
            b.recv_scales if given.scales is not None else None,
            b.recv_topk_idx if chosen else None,
            b.recv_topk_weights if chosen else None,
        )
        with call.allocate():
            made = [None if region is None else _like(region, num_rows) for region in regions]
        for target, region in zip(made, regions):
            if target is not None and region is not None:
                target[:room].copy_(region[:num_rows])
        recv_x, recv_scales, recv_idx, recv_weights = made
        assert recv_x is not None
        if num_rows > room and recv_idx is not None and recv_weights is not None:
            recv_idx[room:] = -1
            recv_weights[room:] = 0
        return recv_x, recv_scales, recv_idx, recv_weights

    def _handle_fields(
        self, joined: Joined, call: Call, num_rows: int, is_token_in_rank: Optional[Tensor]
    ) -> tuple[Any, ...]:
        """What NormalHandle says."""
        b, size, device = joined.regions(_SLOT), self._team.size, self._groups.device
        with call.allocate():
            prefix = torch.empty((size, size), dtype=torch.int32, device=device)
            sources = torch.empty((num_rows,), dtype=torch.int32, device=device)
            none = torch.empty((size, 0), dtype=torch.int32, device=device)
        prefix.zero_()
        prefix[:, self._team.rank].copy_(b.rank_offsets[1:])
        room = b.recv_src.shape[0]
        sources[:room].copy_(b.recv_src[:num_rows, 1])
        sources[room:].fill_(-1)
        return prefix, none, none, sources, is_token_in_rank, none

    # ---- combine -----------------------------------------------------------------------------------

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Optional[Tensor],
        biases: Sequence[Tensor],
        config: Config,
        call: Call,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        device, joined = self._groups.device, handle.joined
        shape, n = joined.shape, handle.num_tokens
        check_tensor("x", x, dtypes=torch.bfloat16, shape=(handle.num_rows, shape.hidden), device=device)
        if topk_weights is not None:
            columns = (handle.num_rows, shape.topk)
            check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=columns, device=device)
        for number, bias in enumerate(biases):
            name = f"bias[{number}]"
            check_tensor(name, bias, dtypes=torch.bfloat16, shape=(n, shape.hidden), device=device)
        with call.run():
            with call.allocate():
                out = torch.empty((n, shape.hidden), dtype=torch.bfloat16, device=device)
                weights = None
                if topk_weights is not None:
                    weights = torch.empty((n, shape.topk), dtype=torch.float32, device=device)
            room = joined.regions(_SLOT).y.shape[0]
            staging = Staging(joined.group, _SLOT)
            staging.give(epd.Region.Y, x[:room])
            for region, bias in zip((epd.Region.BIAS_0, epd.Region.BIAS_1), biases):
                staging.give(region, bias)
            staging.want(epd.Region.OUT, out)
            summed = topk_weights is not None and self._sums_weights
            if topk_weights is not None and weights is not None:
                staging.give(epd.Region.Y_WEIGHTS, topk_weights[:room])
                if summed:
                    staging.want(epd.Region.OUT_WEIGHTS, weights)
            ticket = self._submit_combine(joined, handle, call, config, len(biases), summed, staging)
            self._end(ticket)
            staging.finish()
            if topk_weights is not None and weights is not None and not self._sums_weights:
                weights.copy_(self._summed_over_ranks(handle, topk_weights))
        return out, weights, call.end([x, topk_weights, *biases], [out, weights])

    def _submit_combine(
        self,
        joined: Joined,
        handle: NormalHandle,
        call: Call,
        config: Config,
        num_biases: int,
        return_weights: bool,
        staging: Staging,
    ) -> epd.Ticket:
        def submission(kind: int) -> epd.Ticket:
            return joined.group.combine(
                _SLOT,
                handle.routings[joined.shape],
                stream=call.stream,
                num_biases=num_biases,
                return_weights=kind,
                sms=self._sms(config),
                **staging.keywords,
            )

        if not return_weights:
            return joined.submit(lambda: submission(0))
        try:
            return joined.submit(lambda: submission(SUMMED_OVER_RANKS))
        except epd.InvalidArgument as error:
            if error.field != "return_weights":
                raise
        self._sums_weights = False
        return joined.submit(lambda: submission(0))

    def _summed_over_ranks(self, handle: NormalHandle, topk_weights: Tensor) -> Tensor:
        """Each token's weights [n, K], summed over the ranks that got it, by way of the process group."""
        if self._streams.capturing:
            raise refuse("topk_weights", "a tensor", "None while the stream captures a graph, with this libepd")
        rank, size = self._team.rank, self._team.size
        prefix, sources = handle[0][:, rank].cpu(), handle[3].cpu().long()
        weights = topk_weights.cpu()
        begin, mine = 0, []
        for source in range(size):
            end = int(prefix[source])
            mine.append((sources[begin:end], weights[begin:end]))
            begin = end
        total = torch.zeros((handle.num_tokens, weights.shape[1]), dtype=torch.float32)
        for from_rank in self._team.gather(mine):
            tokens, values = from_rank[rank]
            total[tokens] += values
        return total

    # ---- checks ------------------------------------------------------------------------------------

    def _given(self, x: Rows) -> Given:
        device = self._groups.device
        rows, scales = x if isinstance(x, tuple) else (x, None)
        if scales is None:
            check_tensor("x", rows, dtypes=torch.bfloat16, shape=(None, None), device=device)
            given = Given(rows, None, epd.Payload.BF16, epd.ScaleFormat.FLOAT32)
        else:
            check_tensor("x[0]", rows, dtypes=E4M3, shape=(None, None), device=device)
            packed = isinstance(scales, Tensor) and scales.dtype == torch.int32
            width = -(-rows.shape[1] // 512) if packed else rows.shape[1] // 128
            shape = (rows.shape[0], width)
            check_tensor("x[1]", scales, dtypes=(torch.float32, torch.int32), shape=shape, device=device)
            format = epd.ScaleFormat.UE8M0 if packed else epd.ScaleFormat.FLOAT32
            given = Given(rows, scales, epd.Payload.FP8, format)
        if rows.shape[0] > max_tokens():
            raise refuse("x.shape[0]", rows.shape[0], f"0 .. {max_tokens()}, $EPD_DEEPEP_MAX_TOKENS of all ranks")
        return given

    def _checked_idx(self, given: Given, topk_idx: Tensor) -> Tensor:
        shape = (given.x.shape[0], None)
        return check_tensor("topk_idx", topk_idx, dtypes=torch.int64, shape=shape, device=self._groups.device)

    def _check_weights(self, given: Given, topk_idx: Tensor, topk_weights: Optional[Tensor]) -> None:
        if topk_weights is None:
            raise refuse("topk_weights", None, "a tensor with topk_idx")
        shape = tuple(topk_idx.shape)
        check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=shape, device=self._groups.device)

    def _choices_of_layout(self, given: Given, is_token_in_rank: Optional[Tensor]) -> Choices:
        """Without topk_idx nobody says which expert: each rank stands for one."""
        shape = (given.x.shape[0], self._team.size)
        in_rank = check_tensor(
            "is_token_in_rank", is_token_in_rank, dtypes=torch.bool, shape=shape, device=self._groups.device
        )
        if self._team.size > 32:
            raise refuse("topk_idx", None, f"a tensor in a group of {self._team.size} ranks; none up to 32 ranks")
        return Choices(one_expert_of_each_rank(in_rank), self._team.size)

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
