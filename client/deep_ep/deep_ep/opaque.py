"""Rows that epd does not know, as in float16 or with scales of other blocks: bytes that it moves and does not read."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

_MULTIPLE = 16  # of the bytes of a row
_LARGEST_HIDDEN, _HIDDEN_MULTIPLE = 16384, 8  # of rows that a combine adds up


class OpaqueRows(NamedTuple):
    """How a row lies: its values, its scales, and bytes that mean nothing."""

    columns: int
    dtype: torch.dtype
    values: int  # bytes
    scales: int  # bytes; 0: there are none
    scales_dtype: Optional[torch.dtype]

    @property
    def row_bytes(self) -> int:
        return -(-(self.values + self.scales) // _MULTIPLE) * _MULTIPLE

    @property
    def hidden(self) -> int:
        """The group's hidden size. The group combines bf16 rows of as many columns, if there can be such."""
        fits = self.columns % _HIDDEN_MULTIPLE == 0 and self.columns <= _LARGEST_HIDDEN
        return self.columns if fits else _HIDDEN_MULTIPLE

    def pack(self, x: Tensor, scales: Optional[Tensor]) -> Tensor:
        """[n, row_bytes] uint8. A copy, unless x is such rows already."""
        values = as_bytes(x)
        if self.values == self.row_bytes:
            return values
        packed = values.new_zeros((len(x), self.row_bytes))
        packed[:, : self.values] = values
        if scales is not None:
            packed[:, self.values : self.values + self.scales] = as_bytes(scales)
        return packed

    def room(self, rows: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """For [M, row_bytes] uint8: x, and its scales. `unpack` fills them, unless x is the rows themselves."""
        if self.values == self.row_bytes:
            return rows.view(self.dtype), None
        x = rows.new_empty((len(rows), self.values)).view(self.dtype)
        if self.scales_dtype is None:
            return x, None
        return x, rows.new_empty((len(rows), self.scales)).view(self.scales_dtype)

    def unpack(self, rows: Tensor, x: Tensor, scales: Optional[Tensor]) -> None:
        if self.values == self.row_bytes:
            return
        x.view(torch.uint8).copy_(rows[:, : self.values])
        if scales is not None:
            scales.view(torch.uint8).copy_(rows[:, self.values : self.values + self.scales])


def opaque_rows(x: Tensor, scales: Optional[Tensor]) -> OpaqueRows:
    width = 0 if scales is None else scales.shape[1] * scales.element_size()
    dtype = None if scales is None else scales.dtype
    return OpaqueRows(x.shape[1], x.dtype, x.shape[1] * x.element_size(), width, dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """[n, columns] as [n, bytes] uint8."""
    plain = tensor.resolve_neg().contiguous()
    if plain.stride(-1) != 1:  # of one column; torch calls any stride contiguous then
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8)
