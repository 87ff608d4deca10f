"""The tensors of one operation, as the memory that it uses in place of regions (epd_memory_t).

    staging = Staging()
    staging.give(Region.X, x)                # an input
    staging.want(Region.OUT, out)            # an output
    ticket = group.combine(slot, ..., memory=staging)
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional

from torch import Tensor

from .. import _abi
from .._shapes import SlotShapes
from ..memory import Memory
from ..types import Region

_BYTES = ctypes.sizeof(_abi.Memory)
_Words = ctypes.c_uint64 * (_BYTES // 8)  # the struct, for addresses by their place: faster than by name


def _word(region: Region) -> int:
    """The place of a region's address."""
    if region in (Region.BIAS_0, Region.BIAS_1):
        return _abi.Memory.bias.offset // 8 + (region - Region.BIAS_0)
    offset: int = getattr(_abi.Memory, region.name.lower()).offset
    return offset // 8


_WORDS = [_word(region) for region in sorted(Region)]  # by region
_ROWS_WORD = _abi.Memory.recv_rows.offset // 8
_ROWS_SHIFT = 0 if sys.byteorder == "little" else 32  # recv_rows is the first half of its word


def is_copied(source: Tensor) -> bool:
    """Whether `give` makes a copy, on torch's current stream."""
    return not source.is_contiguous() or source.is_neg()


class Staging(Memory):
    """Memory for one operation. libepd copies; a ticket keeps this, and this keeps the tensors.

    recv_rows  rows of the tensors given for recv_* and y; 0: as many as the group has room for
    """

    __slots__ = ()

    def __init__(self, recv_rows: int = 0) -> None:
        raw = self._raw = _Words(_BYTES)
        if recv_rows:
            raw[_ROWS_WORD] = recv_rows << _ROWS_SHIFT
        self._arrays: Any = []
        self._struct = ctypes.addressof(raw)

    def check(
        self, shapes: SlotShapes, operation: str, num_tokens: Optional[int], num_recv_rows: Optional[int]
    ) -> None:
        """Nothing: who makes one has checked the tensors."""

    def give(self, region: Region, source: Tensor) -> None:
        """An input: its first rows. It may have any strides, and be a view that negates."""
        self.want(region, source.resolve_neg().contiguous() if is_copied(source) else source)

    def want(self, region: Region, target: Tensor) -> None:
        """An output, which is contiguous: its first rows are written."""
        # 0 of an empty tensor: the region, of which nothing is used either.
        self._raw[_WORDS[region]] = target.data_ptr()
        self._arrays.append(target)
