"""x of a call in normal mode: rows that epd knows, or bytes."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from epd.torch import E4M3

from .checks import check_tensor, refuse
from .groups import Shape
from .growth import MOST
from .opaque import OpaqueRows, opaque_rows
from .rows import NORMAL_ROWS

Rows = Union[Tensor, tuple[Tensor, Tensor]]

_BF16, _FP8, _UE8M0 = range(len(NORMAL_ROWS))


class Given(NamedTuple):
    """Rows, and how they are sent."""

    x: Tensor  # [n, H]
    scales: Optional[Tensor]  # [n, S]
    row_format: int = 0
    opaque: Optional[OpaqueRows] = None  # None: epd knows such rows

    def shape(self, num_experts: int, topk: int) -> Shape:
        if self.opaque is None:
            return Shape(num_experts, self.x.shape[1], topk)
        return Shape(num_experts, self.opaque.hidden, topk, opaque=self.opaque.row_bytes)


def given_rows(x: Rows, device: torch.device) -> Given:
    """Checks them."""
    if isinstance(x, tuple) and len(x) != 2:
        raise refuse("x", f"a tuple of {len(x)}", "a tensor, or rows of one byte and their scales")
    rows, scales = x if isinstance(x, tuple) else (x, None)
    name = "x" if scales is None else "x[0]"
    kind = rows.dtype if isinstance(rows, Tensor) else torch.bfloat16
    check_tensor(name, rows, dtypes=kind, shape=(None, None), device=device)
    if rows.shape[0] > MOST.tokens:
        raise refuse("x.shape[0]", rows.shape[0], f"0 .. {MOST.tokens}")
    if kind.is_complex or rows.is_quantized:
        raise refuse(f"{name}.dtype", kind, "types of real numbers")
    if scales is not None:
        return _with_scales(rows, scales, device)
    return Given(rows, None, _BF16) if kind == torch.bfloat16 else Given(rows, None, opaque=opaque_rows(rows, None))


def _with_scales(rows: Tensor, scales: Tensor, device: torch.device) -> Given:
    if rows.element_size() != 1:
        raise refuse("x[0].dtype", rows.dtype, "types of one byte, with scales")
    shape, kinds = (rows.shape[0], None), (torch.float32, torch.int32)
    check_tensor("x[1]", scales, dtypes=kinds, shape=shape, device=device)
    packed = scales.dtype == torch.int32
    if rows.dtype == E4M3 and scales.shape[1] == -(-rows.shape[1] // (512 if packed else 128)):
        return Given(rows, scales, _UE8M0 if packed else _FP8)
    return Given(rows, scales, opaque=opaque_rows(rows, scales))
