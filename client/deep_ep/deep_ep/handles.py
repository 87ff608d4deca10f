"""What a dispatch gives for later calls. Frameworks treat handles as opaque."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional

import torch
from torch import Tensor

import epd
from epd._handles import NotCopied

from .checks import refuse
from .groups import Joined, Shape
from .places import Routing


class _Handle(NotCopied, tuple):  # type: ignore[type-arg]
    pass


class NormalHandle(_Handle):
    """(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank,
    send_head), of which epd fills:

    rank_prefix_matrix  [R, R] int32; [i][r] on rank r: how many of its rows come from ranks 0..i. Other columns
                        repeat this rank's. A copy, made on the current stream when it is asked for
    recv_src_idx        [M] int32: the token's number on its source rank; -1: no token
    is_token_in_rank    as it was given

    The others are empty. The routing is kept until the handle is collected.
    """

    def __new__(
        cls,
        joined: Joined,
        routing: epd.Handle,
        choices: Choices,
        num_rows: int,
        offsets: Tensor,
        fields: tuple[Any, ...],
    ) -> NormalHandle:
        made = tuple.__new__(cls, fields)
        made.joined = joined  # where the routing was made; combines run there
        made.num_tokens = choices.num_tokens
        made.num_rows = num_rows
        made.offsets = offsets  # [R+1]: where rows of each source begin
        made.choices = choices
        made.routings = {joined.shape: routing}  # the same routing in groups of other hidden sizes
        return made

    joined: Joined
    num_tokens: int
    num_rows: int
    offsets: Tensor
    choices: Choices
    routings: dict[Shape, epd.Handle]
    _prefix: Optional[Tensor] = None

    def rank_prefix_matrix(self) -> Tensor:
        if self._prefix is None:
            ranks = self.offsets.shape[0] - 1
            self._prefix = self.offsets[1:].unsqueeze(1).repeat(1, ranks)
        return self._prefix

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self)[at]
        return self.rank_prefix_matrix() if at in (0, -6) else super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))


class Choices:
    """The topk_idx of a dispatch, to establish its routing in another group too."""

    def __init__(self, topk_idx: Tensor, num_experts: int) -> None:
        self.num_experts = num_experts
        self.num_tokens = topk_idx.shape[0]
        self.topk = topk_idx.shape[1]
        try:
            self._version = topk_idx._version
        except RuntimeError:  # a tensor of inference mode: nobody knows whether it changes
            topk_idx = topk_idx.clone()
            self._version = topk_idx._version if not topk_idx.is_inference() else 0
        self._topk_idx = topk_idx

    def topk_idx(self) -> Tensor:
        """Raises InvalidArgument if the tensor was written to since."""
        if not self._topk_idx.is_inference() and self._topk_idx._version != self._version:
            allowed = "the numbers of the handle's dispatch, as long as rows of another hidden size are sent under it"
            raise refuse("topk_idx", "written to", allowed)
        return self._topk_idx


class LowLatencyHandle(_Handle):
    """(src_info, layout_range, T, H, E)

    src_info      [E/R, R*T] int32: the token's number on its source rank
    layout_range  [E/R, R] int64: begin << 32 | count, of each source rank; begin in the expert's block. It is
                  computed when it is asked for, on the current stream, or at once if results are copies
    """

    joined: Joined
    routing: Routing
    num_tokens: int
    counts: Tensor  # [E/R]: rows of each local expert
    _range: Callable[[], Tensor]
    _computed: Optional[Tensor] = None

    def __new__(
        cls,
        joined: Joined,
        routing: Routing,
        num_tokens: int,
        counts: Tensor,
        src_info: Tensor,
        layout_range: Callable[[], Tensor],
    ) -> LowLatencyHandle:
        shape = joined.shape
        made = tuple.__new__(cls, (src_info, None, shape.tokens, shape.hidden, shape.num_experts))
        made.joined = joined
        made.routing = routing
        made.num_tokens = num_tokens
        made.counts = counts
        made._range = layout_range
        return made

    def layout_range(self) -> Tensor:
        if self._computed is None:
            self._computed = self._range()
        return self._computed

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self)[at]
        return self.layout_range() if at in (1, -4) else super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))
