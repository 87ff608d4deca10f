"""Where received rows lie: in a block for each expert, by source rank, without holes. So counts [E/R, R] int64, of each
source rank's rows in each block, say everything."""

from __future__ import annotations

import collections
from typing import Any, Callable, Optional

import torch
from torch import Tensor

import epd

from .groups import Joined
from .turns import Turn


class Routing:
    """One low-latency dispatch: its group and handle, and how its rows lie for the caller (`seen`) and in the group
    (`have`).

    These are one tensor if that is the same, and None in a Buffer whose ranks can't be masked. They differ if the
    caller does not get a masked rank's rows, or if the dispatch was repeated without a lost rank after the caller had
    got its rows. A repeated dispatch has a new handle.
    """

    __slots__ = (
        "_topk_idx",
        "_use",
        "_version",
        "_when_arrived",
        "counts",
        "generation",
        "handle",
        "has_blocks_of_group",
        "have",
        "joined",
        "num_tokens",
        "seen",
        "tokens",
        "turn",
        "y",
    )

    def __init__(self, joined: Joined, turn: Turn, tokens: int, topk_idx: Tensor, counts: Tensor) -> None:
        """tokens: of a rank, for which the caller's blocks of rows have room. counts [E/R]: rows of each local expert,
        when they have arrived"""
        self.joined = joined
        self.generation = joined.generation
        self.turn = turn
        self.tokens = tokens
        self.y: Optional[Tensor] = None  # the caller's rows for a combine, where the group's blocks are larger
        self.has_blocks_of_group = tokens == joined.size.tokens
        self._use = joined.use
        self.num_tokens = topk_idx.shape[0]
        self.counts = counts
        self.handle: Optional[epd.Handle] = None
        self.seen: Optional[Tensor] = None
        self.have: Optional[Tensor] = None
        self._topk_idx = topk_idx
        self._version = version_of(topk_idx)
        self._when_arrived: Optional[list[Callable[[], None]]] = []  # None: the rows have arrived

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape of the rows that a combine sends back."""
        joined = self.joined
        if self.has_blocks_of_group:
            return joined.y_shape
        blocks, rows, hidden = joined.y_shape
        return blocks, rows // joined.size.tokens * self.tokens, hidden

    def when_arrived(self, call: Callable[[], None]) -> None:
        if self._when_arrived is None:
            call()
        else:
            self._when_arrived.append(call)

    def arrived(self) -> None:
        for call in self._when_arrived or ():
            call()  # again, if this is interrupted
        self._when_arrived = None

    def is_by(self, topk_idx: Tensor) -> bool:
        """The tensor is the dispatch's own, and nobody has written to it since. False if that is not known."""
        return topk_idx is self._topk_idx and self._version is not None and self._version == version_of(topk_idx)


class Kept:
    """A note that a tensor keeps until torch writes to it. A copied tensor shares it, an unpickled one has none."""

    __slots__ = ("version", "what")

    def __init__(self, what: Any, version: Any) -> None:
        self.what = what
        self.version = version

    def __deepcopy__(self, memo: object) -> Kept:
        return self

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ()  # torch.load takes no class of ours


def version_of(tensor: Tensor) -> Optional[int]:
    """It changes when torch writes to the tensor. None: not known."""
    try:
        return tensor._version
    except RuntimeError:  # of inference mode
        return None


def counts_in(source_ranges: Tensor) -> Tensor:
    """The numbers of rows, from the region [E/R, R, 2] int32: first row and number of rows."""
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


def move_tokens(
    rows: Tensor, have: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tokens: int
) -> Tensor:
    """A copy of rows [E/R, N, H] that lie as `have` says, laid as `want` says: each src_info [E/R, N] and layout_range
    [E/R, R]. Rows that `have` lacks are zero. tokens: the most of a rank."""
    given, wanted = (_numbers(*each, tokens) for each in (have, want))
    at = torch.searchsorted(given, wanted).clamp_(max=given.shape[1] - 1)
    found = given.gather(1, at) == wanted
    moved = rows[torch.arange(len(rows), device=rows.device)[:, None], at]
    return moved.masked_fill_(~found.unsqueeze(-1), 0)


def _numbers(src_info: Tensor, layout_range: Tensor, tokens: int) -> Tensor:
    """Each row's token among all tokens of all ranks; ascending, with large ones behind the last row. [E/R, N]"""
    place = torch.arange(src_info.shape[1], device=src_info.device).repeat(len(src_info), 1)
    ends = (layout_range & 0xFFFFFFFF).cumsum(1)
    source = torch.searchsorted(ends, place, right=True)
    number = source * tokens + src_info
    return torch.where(source < ends.shape[1], number, ends.shape[1] * tokens + place)
