"""Which ranks the caller has masked, and which are lost."""

from __future__ import annotations

import contextlib
from typing import Optional

import torch
from torch import Tensor

import epd

from .checks import check_number, not_served, refuse
from .groups import Groups
from .streams import Streams


class Masks:
    """The masks of a Buffer with enable_shrink. No tokens go to a masked rank, and none of its tokens arrive here."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self._groups = groups
        self._streams = streams
        self._size = groups.size
        self._masked: set[int] = set()
        self.hidden: Optional[Tensor] = None  # [R] bool: the ranks that the caller has masked. None: nobody

    def update(self, rank: int, mask: bool) -> None:
        allowed = f"0 .. {self._size - 1}"
        if check_number("rank_to_mask", rank, 0, allowed) >= self._size:
            raise refuse("rank_to_mask", rank, allowed)
        if not mask and rank in self._groups.lost():
            raise not_served(f"mask of rank {rank}, which is lost,", False, "True until it is taken back")
        self._set(self._masked | {rank} if mask else self._masked - {rank})

    def clean(self) -> None:
        """Ranks that were late and live are taken back. Those that are gone stay lost."""
        for joined in self._groups.all():
            with contextlib.suppress(epd.Error):  # it was told to the caller, or will be by restore
                joined.settle()  # on a GPU nobody learns of a loss before
        self.status()
        for joined in self._groups.all():
            if joined.steps is not None and any(joined.lost(rank) for rank in range(self._size)):
                joined.steps.restore(joined)
        self._set(set())

    def status(self) -> set[int]:
        """The ranks that are masked or lost. Takes notice of a break first, as that of a replayed graph."""
        for joined in self._groups.all():
            if joined.steps is not None:
                with contextlib.suppress(epd.RankLost):  # this rank is
                    joined.steps.check(joined, self._streams.current())
        return self._masked | self._groups.lost()

    def _set(self, masked: set[int]) -> None:
        self._masked = masked
        table = [rank in masked for rank in range(self._size)]
        self.hidden = torch.tensor(table, device=self._groups.device) if masked else None


def without(hidden: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    """topk_idx with -1 for the experts of hidden ranks."""
    of_expert = hidden.repeat_interleave(num_experts // len(hidden))
    return topk_idx.masked_fill(of_expert[topk_idx.clamp(0, num_experts - 1)], -1)
