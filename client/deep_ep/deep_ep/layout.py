"""The ranks that get each token, by torch's own operations."""

from __future__ import annotations

import weakref
from typing import Optional

import torch
from torch import Tensor

from .checks import check_number, refuse
from .places import Kept, version_of

_CHOICES = "_epd_choices"  # attribute of an is_token_in_rank: the topk_idx that it is of
topk_idx_t = torch.int64  # of topk_idx


def dispatch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """num_tokens_per_rank [R] int32, num_tokens_per_expert [E] int32, is_token_in_rank [n, R] bool."""
    check_number("num_experts", num_experts, 1, f"a multiple of {num_ranks}, the group's size", multiple=num_ranks)
    if not topk_idx.is_cuda and topk_idx.numel() != 0:  # on a GPU the CPU would have to wait; the dispatch tells
        chosen = int(topk_idx.max())
        if chosen >= num_experts:
            token, choice = divmod(int(topk_idx.argmax()), topk_idx.shape[1])
            allowed = f"0 .. {num_experts - 1}, or a negative number: no selection"
            raise refuse(f"topk_idx[{token}, {choice}]", chosen, allowed)
    device, choices = topk_idx.device, _known_choices(topk_idx, num_experts)
    in_rank = _ranks_of(choices, num_experts, num_ranks)
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, choices.view(-1), one.expand(choices.numel()))
    return in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts], in_rank


def tokens_in_ranks(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """is_token_in_rank [n, R] bool alone. A choice that is no expert counts as no selection."""
    return _ranks_of(_known_choices(topk_idx, num_experts), num_experts, num_ranks)


def note_layout(in_rank: Tensor, topk_idx: Tensor) -> None:
    """in_rank is of these choices, until one of both is written to."""
    versions = version_of(topk_idx), version_of(in_rank)
    setattr(in_rank, _CHOICES, Kept(weakref.ref(topk_idx), versions))


def is_layout_of(in_rank: Tensor, topk_idx: Tensor) -> bool:
    """False also if that is not known."""
    kept: Optional[Kept] = getattr(in_rank, _CHOICES, None)
    if kept is None or kept.what() is not topk_idx:
        return False
    return bool(kept.version == (version_of(topk_idx), version_of(in_rank)))


def without_dropped(topk_idx: Tensor, in_rank: Tensor, num_experts: int) -> Tensor:
    """topk_idx with -1 for experts of ranks that the token is not to be sent to."""
    num_ranks = in_rank.shape[1]
    ranks = torch.div(topk_idx.clamp(0, num_experts - 1), num_experts // num_ranks, rounding_mode="floor")
    dropped = ~in_rank.gather(1, ranks) & (topk_idx < num_experts)  # others are refused
    return topk_idx.masked_fill(dropped, -1)


def one_expert_of_each_rank(is_token_in_rank: Tensor, experts_of_rank: int = 1) -> Tensor:
    """topk_idx [n, R]: the first expert of each rank that gets the token, else -1."""
    num_experts = is_token_in_rank.shape[1] * experts_of_rank
    firsts = torch.arange(0, num_experts, experts_of_rank, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, firsts, -1)


def _known_choices(topk_idx: Tensor, num_experts: int) -> Tensor:
    """No selection counts as one of an expert behind the last, on a rank behind the last."""
    return topk_idx.masked_fill(topk_idx < 0, num_experts).clamp_(max=num_experts)


def _ranks_of(chosen: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    ranks = torch.div(chosen, num_experts // num_ranks, rounding_mode="floor")
    in_rank = torch.zeros((len(chosen), num_ranks + 1), dtype=torch.bool, device=chosen.device)
    return in_rank.scatter_(1, ranks, True)[:, :num_ranks].contiguous()
