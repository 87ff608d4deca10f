"""Handles are what DeepEP's are: tuples of tensors and numbers. They may be taken apart, put together again, kept by
autograd, copied, pickled, and used with another Buffer of the same ranks.

One of the tensors keeps the routing, so whoever keeps the tensors keeps it. Where that tensor was copied by value or
unpickled, or another Buffer is used, the operation that needs the routing establishes it again. All ranks must have
treated the handle alike then, as it takes a dispatch.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional

import torch
from torch import Tensor

import epd

from .checks import check_tensor, refuse
from .groups import Joined
from .layout import one_expert_of_each_rank
from .places import Kept, Routing, version_of

_ROUTING = "_epd_routing"  # attribute of the tensor that keeps a routing


def _keep(tensor: Tensor, routing: Any) -> None:
    setattr(tensor, _ROUTING, Kept(routing, version_of(tensor)))


def _kept_by(tensor: Tensor) -> Any:
    kept: Optional[Kept] = getattr(tensor, _ROUTING, None)
    return kept.what if kept is not None and kept.version == version_of(tensor) else None


class NormalRouting:
    """The routing of one normal dispatch, and epd's handle of it in each group that knows it."""

    __slots__ = ("handles", "in_rank", "num_experts", "num_rows", "num_tokens", "offsets", "topk")

    def __init__(self, in_rank: Tensor, num_tokens: int, num_experts: int, topk: int, num_rows: int) -> None:
        self.in_rank = in_rank  # [n, R] bool
        self.num_tokens = num_tokens
        self.num_experts = num_experts
        self.topk = topk
        self.num_rows = num_rows
        self.offsets: Optional[Tensor] = None  # [R+1]: where rows of each source begin; None: no group knows it
        self.handles: dict[Joined, epd.Handle] = {}

    def topk_idx(self, topk: int) -> Tensor:
        """Choices that establish the same routing: the first expert of each rank that gets the token. topk: at least as
        many as the dispatch had."""
        num_ranks = self.in_rank.shape[1]
        chosen = one_expert_of_each_rank(self.in_rank, self.num_experts // num_ranks)
        if topk >= num_ranks:
            return torch.nn.functional.pad(chosen, (0, topk - num_ranks), value=-1)
        return chosen.topk(topk, dim=1).values  # a token has no more ranks than choices


def normal_handle(routing: NormalRouting, src_idx: Tensor, num_ranks: int, unused: Unused) -> tuple[Tensor, ...]:
    """(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank,
    send_head)

    rank_prefix_matrix  [R, R] int32; [i][r] on rank r: how many of its rows come from ranks 0..i. Other columns
                        repeat this rank's
    recv_src_idx        [M] int32: the token's number on its source rank; -1: no token. It keeps the routing
    is_token_in_rank    [n, R] bool

    epd has no channels: only the shapes of the next two, [R, E] and [R, K], say something. send_head is empty.
    """
    assert routing.offsets is not None
    _keep(src_idx, routing)
    experts, choices, send_head = unused
    prefix = routing.offsets.as_strided((num_ranks, num_ranks), (1, 0), 1)
    return prefix, experts, choices, src_idx, routing.in_rank, send_head


Unused = tuple[Tensor, Tensor, Tensor]


def unused_parts(num_ranks: int, num_experts: int, topk: int, device: torch.device) -> Unused:
    """Placeholders for DeepEP's matrices of channels and its send_head in the handles of a group."""
    zero = torch.zeros((1, 1), dtype=torch.int32, device=device)
    return zero.expand(num_ranks, num_experts), zero.expand(num_ranks, topk), zero.expand(num_ranks, 1)[:0]


def _given(handle: Any) -> str:
    size = f" of {len(handle)}" if isinstance(handle, (tuple, list)) else ""
    return f"a {type(handle).__name__}{size}"


def normal_routing(handle: Any, device: torch.device, ranks: int) -> NormalRouting:
    """The routing of a handle. Without `handles` if it must be established again."""
    allowed = "a tuple of 6 tensors, which a normal dispatch returned"
    if not isinstance(handle, (tuple, list)) or len(handle) != 6:
        raise refuse("handle", _given(handle), allowed)
    src_idx = handle[3]
    routing: Optional[NormalRouting] = _kept_by(src_idx)
    if not isinstance(routing, NormalRouting):
        if not all(isinstance(tensor, Tensor) for tensor in handle):
            raise refuse("handle", _given(handle), allowed)
        _, experts, choices, _, in_rank, _ = handle
        matrices = experts.dim() == choices.dim() == in_rank.dim() == 2
        if not matrices or src_idx.dim() != 1 or in_rank.dtype != torch.bool:
            raise refuse("handle", f"tensors of {[list(tensor.shape) for tensor in handle]}", allowed)
        routing = NormalRouting(in_rank, len(in_rank), experts.shape[1], choices.shape[1], len(src_idx))
        _keep(src_idx, routing)
    in_rank = routing.in_rank
    if in_rank.shape[1] != ranks or in_rank.device != device:
        given = f"of {in_rank.shape[1]} ranks on {in_rank.device}"
        raise refuse("handle", given, f"handles of {ranks} ranks on {device}")
    return routing


class LowLatencyHandle(tuple):  # type: ignore[type-arg]
    """(src_info, layout_range, T, H, E)

    src_info      [E/R, R*T] int32: the token's number on its source rank
    layout_range  [E/R, R] int64: begin << 32 | count, of each source rank; begin in the expert's block. It keeps the
                  routing

    The tensors are made when they are asked for, on the current stream, and stay. They are complete when the dispatch
    is. A copy of the handle is a plain tuple.
    """

    routing: Routing
    _sources: Tensor
    _range: Callable[[], Tensor]
    _made: Optional[tuple[Tensor, Tensor]] = None

    def __new__(cls, routing: Routing, sources: Tensor, layout_range: Callable[[], Tensor]) -> LowLatencyHandle:
        """sources and layout_range(): as the dispatch delivers them, until another one uses its slot"""
        shape = routing.joined.shape
        made = tuple.__new__(cls, (None, None, routing.tokens, shape.hidden, shape.num_experts))
        made.routing, made._sources, made._range = routing, sources, layout_range
        return made

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self._made is None:
            sources, ranks = self._sources, self.routing.joined.group.config.num_ranks
            layout_range = sources.new_empty((len(sources), ranks), dtype=torch.int64)
            _keep(layout_range, self.routing)
            self._made = (torch.empty_like(sources), layout_range)
            self.routing.when_arrived(self._fill)
        return self._made

    def _fill(self) -> None:
        assert self._made is not None
        self._made[0].copy_(self._sources)
        self._made[1].copy_(self._range())
        _keep(self._made[1], self.routing)  # as it is now

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self)[at]
        return self._tensors()[at % 5] if at in (0, 1, -5, -4) else super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return self is other  # as tuples of tensors are found in lists and dicts

    __hash__ = object.__hash__

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other

    def __reduce_ex__(self, protocol: object) -> Any:
        return tuple, (list(self),)


class Foreign:
    """A low-latency handle whose routing no group of this Buffer knows: it says how the rows lie that it answers."""

    def __init__(self, handle: Any, device: torch.device, num_ranks: int) -> None:
        src_info, layout_range, self.tokens, self.hidden, self.num_experts = handle
        local = self.num_experts // num_ranks
        rows = (local, num_ranks * self.tokens)
        self.y_shape = (*rows, self.hidden)
        check_tensor("handle[0]", src_info, dtypes=torch.int32, shape=rows, device=device)
        check_tensor("handle[1]", layout_range, dtypes=torch.int64, shape=(local, num_ranks), device=device)
        self.src_info, self.layout_range = src_info, layout_range


def low_latency_routing(handle: Any) -> Optional[Routing]:
    """The routing of a handle; None: it must be established again."""
    if isinstance(handle, LowLatencyHandle):
        return handle.routing
    fits = isinstance(handle, (tuple, list)) and len(handle) == 5 and all(isinstance(n, int) for n in handle[2:])
    if not fits or not isinstance(handle[1], Tensor):
        allowed = "a tuple of 2 tensors and 3 numbers, which a low-latency dispatch returned"
        raise refuse("handle", _given(handle), allowed)
    routing = _kept_by(handle[1])
    return routing if isinstance(routing, Routing) else None
