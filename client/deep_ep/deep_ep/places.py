"""Where received rows lie: in a block for each expert, by source rank, without holes. So counts [E/R, R] int64, of each
source rank's rows in each block, say everything."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

import epd


class Routing:
    """Of one dispatch: its handle, and how its rows lie for the caller (`seen`) and in the group (`have`).

    These are one tensor if that is the same, and None in a Buffer whose ranks can't be masked. They differ if the
    caller does not get a masked rank's rows, or if the dispatch was repeated without a lost rank after the caller had
    got its rows. A repeated dispatch has a new handle.
    """

    __slots__ = ("handle", "have", "seen")

    def __init__(self) -> None:
        self.handle: Optional[epd.Handle] = None
        self.seen: Optional[Tensor] = None
        self.have: Optional[Tensor] = None


def counts_in(source_ranges: Tensor) -> Tensor:
    """Of the region [E/R, R, 2] int32: first row and number of rows."""
    return source_ranges[..., 1].long()


def layout_range(counts: Tensor) -> Tensor:
    """[E/R, R] int64: begin in the block << 32 | count; begin is 0 where there are no rows."""
    begin = (counts.cumsum(1) - counts).masked_fill(counts == 0, 0)
    return (begin << 32) | counts


def move(rows: Tensor, have: Tensor, want: Tensor) -> Tensor:
    """A copy of rows [E/R, N, ...] that lie as `have` says, laid as `want` says. All that `have` lacks is zero."""
    blocks, size = rows.shape[:2]
    ends = want.cumsum(1)
    place = torch.arange(size, device=rows.device).repeat(blocks, 1)
    source = torch.searchsorted(ends, place, right=True).clamp_(max=want.shape[1] - 1)
    number = place - (ends - want).gather(1, source)  # of the row, among those of its source
    found = (place < ends[:, -1:]) & (number < have.gather(1, source))
    at = (have.cumsum(1) - have).gather(1, source) + number
    at += torch.arange(0, blocks * size, size, device=rows.device)[:, None]
    raw = rows.contiguous()
    if raw.element_size() == 1:  # torch has few operations for e4m3
        raw = raw.view(torch.uint8)
    flat = raw.view(blocks * size, *rows.shape[2:])
    moved = flat[at.masked_fill_(~found, 0).view(-1)].view(raw.shape)
    moved.masked_fill_(~found.view(blocks, size, *[1] * (rows.dim() - 2)), 0)
    return moved.view(rows.dtype)
