"""Normal mode: one row for each (token, rank), by source rank, then token."""

from __future__ import annotations

import gc
from typing import NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

import epd
from epd.torch import E4M3
from epd.torch.staging import Staging, is_copied

from .checks import check_kind, check_number, check_tensor, refuse
from .config import HANDLES, Config
from .events import EventOverlap
from .groups import Groups, Joined, Shape
from .handles import Choices, NormalHandle
from .layout import one_expert_of_each_rank
from .rows import NORMAL_ROWS
from .streams import Call, Streams
from .team import Team

Rows = Union[Tensor, tuple[Tensor, Tensor]]
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
_BF16, _FP8, _UE8M0 = range(len(NORMAL_ROWS))
_SLOT = 0
_MOST_ROWS = (1 << 31) - 1


class Given(NamedTuple):
    """x of a call."""

    x: Tensor  # [n, H] bf16 or e4m3
    scales: Optional[Tensor]  # [n, S] of e4m3
    row_format: int

    def shape(self, num_experts: int, topk: int) -> Shape:
        return Shape(num_experts, self.x.shape[1], topk)


class _Received(NamedTuple):
    """Results of a dispatch, in the order of _RECEIVED."""

    x: Tensor
    scales: Optional[Tensor]
    topk_idx: Optional[Tensor]
    topk_weights: Optional[Tensor]
    src: Optional[Tensor] = None

    def rows(self) -> Rows:
        return self.x if self.scales is None else (self.x, self.scales)

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
        self._max_tokens = groups.settings.max_tokens

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
        allowed = f"0 (as many as come), or 1 .. {_MOST_ROWS}"
        if check_number("num_worst_tokens", num_worst_tokens, 0, allowed) > _MOST_ROWS:
            raise refuse("num_worst_tokens", num_worst_tokens, allowed)
        if num_worst_tokens == 0 and self._streams.capturing:
            raise refuse("num_worst_tokens", 0, "1 or more while the stream captures a graph: nothing may wait")
        check_kind("num_tokens_per_expert", num_tokens_per_expert, Tensor, "a tensor [num_experts]")
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
            offsets = self._new(call, (self._team.size + 1,), torch.int32)
            received: Optional[_Received] = None
            if num_worst_tokens > 0:
                received = self._make(joined, given, call, num_worst_tokens, topk_idx is not None)
                received.mark_unused()
            staging = self._staging_of_rows(given, num_worst_tokens)
            for region, target in zip(_RECEIVED, received or ()):
                if target is not None:
                    staging.want(region, target)
            staging.give(epd.Region.TOPK_IDX, choices.topk_idx())
            if topk_weights is not None:
                staging.give(epd.Region.TOPK_WEIGHTS, topk_weights)
            staging.want(epd.Region.RANK_OFFSETS, offsets)
            ticket = self._submit(joined, given, choices, call, config, topk_weights is None, staging)
            if received is None:
                known = ticket.counts()
                counts = list(known.expert_counts) if counts is None else counts
            self._end(ticket)
            if received is None:
                received = self._make(joined, given, call, known.num_recv_rows, topk_idx is not None)
                received.copy_from(joined.regions(_SLOT, given.row_format))
        none = offsets.new_empty((self._team.size, 0))
        fields = (None, none, none, received.sources, is_token_in_rank, none)  # the first is made when asked for
        handle = NormalHandle(joined, ticket.handle, choices, received.x.shape[0], offsets, fields)
        inputs = [given.x, given.scales, choices.topk_idx(), topk_weights]
        event = call.end(inputs, [*received, offsets])
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts or ()]
        return received.rows(), received.topk_idx, received.topk_weights, aligned, handle, event

    def dispatch_again(
        self, x: Rows, handle: NormalHandle, config: Config, call: Call
    ) -> tuple[Rows, EventOverlap]:
        """The rows of x under the routing of a handle."""
        given = self._given(x)
        self._groups.check_own(handle.joined)
        if given.x.shape[0] != handle.num_tokens:
            raise refuse("x.shape[0]", given.x.shape[0], f"{handle.num_tokens}, as of the handle's dispatch")
        choices, scales = handle.choices, given.scales
        shape = given.shape(choices.num_experts, choices.topk)
        routing = handle.routings.get(shape)
        copies = is_copied(given.x) or (scales is not None and is_copied(scales))
        with call.run(torch_works=copies or routing is None):
            joined = self._groups.normal(shape, self._streams)
            received = self._make(joined, given, call, handle.num_rows)
            staging = self._staging_of_rows(given)
            staging.want(_RECV_X, received.x)
            if received.scales is not None:
                staging.want(_RECV_SCALES, received.scales)
            if routing is None:  # the first rows of this hidden size under the handle
                staging.give(epd.Region.TOPK_IDX, choices.topk_idx())
                ticket = self._submit(joined, given, choices, call, config, True, staging)
                handle.routings[shape] = ticket.handle
            else:
                ticket = self._submit_again(joined, given, routing, call, config, staging)
            self._end(ticket)
        inputs = (given.x, scales, choices.topk_idx() if routing is None else None)
        event = call.end(inputs, (received.x, received.scales))
        return received.rows(), event

    def _submit(
        self,
        joined: Joined,
        given: Given,
        choices: Choices,
        call: Call,
        config: Config,
        omit_weights: bool,
        staging: Staging,
    ) -> epd.Dispatch:
        """Takes a handle. Handles in cycles are collected before it is refused."""
        options = {
            "stream": call.stream,
            "omit_weights": omit_weights,
            "keep_handle": True,
            "sms": self._sms(config),
            "row_format": given.row_format,
            "memory": staging,
        }
        try:
            return joined.submit(joined.group.dispatch, _SLOT, choices.num_tokens, **options)
        except epd.ResourceExhausted as error:
            if "num_handles" not in str(error):
                raise
            if not self._streams.capturing:
                gc.collect()
        try:
            return joined.submit(joined.group.dispatch, _SLOT, choices.num_tokens, **options)
        except epd.ResourceExhausted as error:
            if "num_handles" not in str(error):
                raise
            raise _no_handle(joined) from error

    def _submit_again(
        self, joined: Joined, given: Given, routing: epd.Handle, call: Call, config: Config, staging: Staging
    ) -> epd.Dispatch:
        return joined.submit(
            joined.group.dispatch,
            _SLOT,
            handle=routing,
            stream=call.stream,
            omit_weights=True,
            sms=self._sms(config),
            row_format=given.row_format,
            memory=staging,
        )

    def _staging_of_rows(self, given: Given, recv_rows: int = 0) -> Staging:
        """recv_rows: for which there is room; 0: exactly as many as will come."""
        staging = Staging(recv_rows)
        staging.give(_X, given.x)
        if given.scales is not None:
            staging.give(_X_SCALES, given.scales)
        return staging

    def _make(
        self, joined: Joined, given: Given, call: Call, num_rows: int, chosen: Optional[bool] = None
    ) -> _Received:
        """Tensors for the results. chosen None: under a handle, for the rows alone; False: without topk_idx."""
        b = joined.regions(_SLOT, given.row_format)
        with call.allocate():
            recv_x = self._groups.rows((num_rows, joined.shape.hidden), b.recv_x.dtype, self._streams)
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
        handle: NormalHandle,
        topk_weights: Optional[Tensor],
        biases: Sequence[Tensor],
        config: Config,
        call: Call,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        self._groups.check_own(handle.joined)
        device, joined = self._groups.device, handle.joined
        shape, n = joined.shape, handle.num_tokens
        check_tensor("x", x, dtypes=torch.bfloat16, shape=(handle.num_rows, shape.hidden), device=device)
        if topk_weights is not None:
            columns = (handle.num_rows, shape.topk)
            check_tensor("topk_weights", topk_weights, dtypes=torch.float32, shape=columns, device=device)
        for number, bias in enumerate(biases):
            name = f"bias[{number}]"
            check_tensor(name, bias, dtypes=torch.bfloat16, shape=(n, shape.hidden), device=device)
        inputs = (x, topk_weights, *biases)
        with call.run(torch_works=any(each is not None and is_copied(each) for each in inputs)):
            with call.allocate():
                out = self._groups.rows((n, shape.hidden), torch.bfloat16, self._streams)
            staging = Staging(handle.num_rows)
            staging.give(_Y, x)
            staging.give(_RANK_OFFSETS, handle.offsets)
            for region, bias in zip((epd.Region.BIAS_0, epd.Region.BIAS_1), biases):
                staging.give(region, bias)
            staging.want(_OUT, out)
            weights, kind = None, _NO_WEIGHTS
            if topk_weights is not None:
                weights, kind = self._new(call, (n, shape.topk), torch.float32), epd.ReturnWeights.SUM
                staging.give(epd.Region.Y_WEIGHTS, topk_weights)
                staging.want(epd.Region.OUT_WEIGHTS, weights)
            ticket = joined.submit(
                joined.group.combine,
                _SLOT,
                handle.routings[shape],
                stream=call.stream,
                num_biases=len(biases),
                return_weights=kind,
                sms=self._sms(config),
                memory=staging,
                num_tokens=n,
            )
            self._end(ticket)
        return out, weights, call.end((*inputs, handle.offsets), (out, weights))

    # ---- checks ------------------------------------------------------------------------------------

    def _given(self, x: Rows) -> Given:
        device = self._groups.device
        if isinstance(x, tuple) and len(x) != 2:
            raise refuse("x", f"a tuple of {len(x)}", "a tensor, or e4m3 rows and their scales")
        rows, scales = x if isinstance(x, tuple) else (x, None)
        if scales is None:
            check_tensor("x", rows, dtypes=torch.bfloat16, shape=(None, None), device=device)
            given = Given(rows, None, _BF16)
        else:
            check_tensor("x[0]", rows, dtypes=E4M3, shape=(None, None), device=device)
            packed = isinstance(scales, Tensor) and scales.dtype == torch.int32
            width = -(-rows.shape[1] // (512 if packed else 128))
            shape = (rows.shape[0], width)
            check_tensor("x[1]", scales, dtypes=(torch.float32, torch.int32), shape=shape, device=device)
            given = Given(rows, scales, _UE8M0 if packed else _FP8)
        if rows.shape[0] > self._max_tokens:
            allowed = f"0 .. {self._max_tokens}, $EPD_DEEPEP_MAX_TOKENS of all ranks"
            raise refuse("x.shape[0]", rows.shape[0], allowed)
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


def _no_handle(joined: Joined) -> epd.Error:
    most = joined.group.config.num_handles
    given = f"${HANDLES} is {most}, and {most} handles of {joined.shape} are alive"
    return epd.ResourceExhausted(f"{given}; allowed: fewer, or a larger ${HANDLES} on all ranks")


def _like(region: Tensor, num_rows: int) -> Tensor:
    return torch.empty((num_rows, *region.shape[1:]), dtype=region.dtype, device=region.device)
