"""How large groups of normal mode are, and how they grow.

A rank whose call needs more tokens or handles than the group has asks all others for a larger group. It makes a
dispatch of one choice that is no expert. That fails on all ranks, before any row has moved, and each is told the
choice, which says how large the group must be. All ranks then join a larger one in its place and make their dispatch
there. Routings of handles are established there again when they are used. So ranks must wait for the end of a dispatch
that may be so answered, as they do for its counts.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

import epd

_CHOICE = 1 << 30  # experts have smaller numbers, and devices tell choices below 1 << 31
_ASKED = re.compile(r"operation (\d+): topk_idx\[0,0\] is (\d+) on rank")


class Size(NamedTuple):
    """Powers of two, in normal mode."""

    tokens: int  # the most of a rank
    handles: int  # that may live at one time; 0: in low-latency mode

    def covers(self, other: Size) -> bool:
        return self.tokens >= other.tokens and self.handles >= other.handles

    def covering(self, other: Size) -> Size:
        """The smallest one that covers both."""
        return Size(max(self.tokens, other.tokens), max(self.handles, other.handles))

    def for_tokens(self, tokens: int) -> Size:
        return self.covering(Size(1 << max(tokens - 1, 0).bit_length(), 0))


NOTHING = Size(0, 0)
FIRST = Size(2048, 64)  # of a group, until more is needed
# Where nobody waits for a dispatch, and so no rank can ask.
FIRST_UNTOLD = Size(4096, 256)
MOST = Size(65536, 4096)


def choice_for(size: Size) -> int:
    """The choice that asks for a group of this size."""
    return _CHOICE | size.tokens.bit_length() << 8 | size.handles.bit_length()


class Asked(NamedTuple):
    """The size that a rank has asked for by a dispatch that failed."""

    op_index: int
    size: Size


def asked_by(error: epd.InvalidArgument) -> Optional[Asked]:
    """None: the error is another one."""
    found = _ASKED.search(error.text)
    if found is None:
        return None
    tokens, handles = divmod(int(found[2]) - _CHOICE, 256)
    size = Size(1 << tokens >> 1, 1 << handles >> 1) if 0 < tokens < 32 and handles < 32 else MOST
    return Asked(int(found[1]), size) if MOST.covers(size) and choice_for(size) == int(found[2]) else None
