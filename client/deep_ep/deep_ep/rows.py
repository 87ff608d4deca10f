"""Copies of the rows that hold something."""

from __future__ import annotations

import torch
from torch import Tensor

_numbers: dict[tuple[torch.device, int], Tensor] = {}


def copy_counted(target: Tensor, source: Tensor, counts: Tensor, most: int) -> None:
    """target[e, :counts[e]] = source[e, :counts[e]] of [E, N, H]. All counts together are at most `most`.

    On a GPU nothing waits for the counts.
    """
    experts, rows = target.shape[:2]
    if target.device.type != "cuda":
        for expert, count in enumerate(counts.tolist()):
            target[expert, :count] = source[expert, :count]
        return
    at = counted_rows(counts, rows, min(most, experts * rows))
    flat = source.reshape(experts * rows, -1)
    target.view(experts * rows, -1).index_copy_(0, at, flat.index_select(0, at))


def counted_rows(counts: Tensor, rows: int, most: int) -> Tensor:
    """[most] int64: the numbers of the first counts[e] rows of each block of `rows`; the last one fills the rest."""
    key = (counts.device, most)
    numbers = _numbers.get(key)
    if numbers is None:
        numbers = _numbers[key] = torch.arange(most, dtype=torch.int64, device=counts.device)
    ends = counts.cumsum(0, dtype=torch.int64)
    at = torch.minimum(numbers, ends[-1] - 1).clamp_(min=0)
    expert = torch.searchsorted(ends, at, right=True).clamp_(max=counts.shape[0] - 1)
    return at + (expert * rows - (ends - counts).gather(0, expert))
