"""Numbers for tests: rows of e4m3, differences, hashes."""

from __future__ import annotations

import torch
from torch import Tensor

import epd
from epd.torch import E4M3

_BLOCK = 128  # values that share a scale
_LARGEST = 448.0  # of e4m3


def _check_e4m3() -> None:
    if E4M3 == torch.uint8:
        raise epd.Unsupported(f"torch is {torch.__version__}; allowed for rows of e4m3: 2.1 or later")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(value: int, alignment: int) -> int:
    """The next multiple of alignment."""
    return ceil_div(value, alignment) * alignment


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[n, H] to e4m3 [n, H] and float32 scales [n, ceil(H/128)]."""
    _check_e4m3()
    blocks = _blocks(x)
    scales = blocks.abs().amax(-1).clamp_(min=1e-4) / _LARGEST
    return _columns(blocks / scales.unsqueeze(-1), x).to(E4M3), scales


def per_token_cast_back(x: Tensor, scales: Tensor) -> Tensor:
    """e4m3 [n, H] and scales, float32 [n, ceil(H/128)] or int32 [n, ceil(H/512)] of four exponents each, to bf16
    [n, H]."""
    _check_e4m3()
    if x.numel() == 0:
        return x.to(torch.bfloat16)
    if scales.dtype == torch.int32:
        rows = scales.clone(memory_format=torch.contiguous_format)  # one column may be contiguous with any stride
        exponents = rows.view(torch.uint8)[:, : ceil_div(x.shape[1], _BLOCK)]
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)
    return _columns(_blocks(x) * scales.unsqueeze(-1), x).to(torch.bfloat16)


def _blocks(x: Tensor) -> Tensor:
    """[n, H] as float32 [n, ceil(H/128), 128], with zeros behind the last column."""
    missing = align(x.shape[1], _BLOCK) - x.shape[1]
    return torch.nn.functional.pad(x.float(), (0, missing)).unflatten(1, (-1, _BLOCK))


def _columns(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(1)[:, : like.shape[1]]


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 less the cosine-like similarity of x + 1 and y + 1: 0 for equal tensors."""
    a, b = x.double() + 1, y.double() + 1
    both = (a.square() + b.square()).sum()
    return 0.0 if x.numel() == 0 else float(1 - 2 * (a * b).sum() / both)


def hash_tensor(tensor: Tensor) -> int:
    """The sum of a tensor's 32-bit words."""
    return int(tensor.contiguous().view(torch.int32).sum(dtype=torch.int64))


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Each row [n, K] of numbers below num_slots (negative: none) becomes its different numbers, most frequent ones
    anywhere, then -1."""
    present = torch.zeros((x.shape[0], num_slots + 1), dtype=torch.bool, device=x.device)
    present.scatter_(1, x.masked_fill(x < 0, num_slots), True)
    numbers = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    found = numbers.expand(x.shape[0], -1).masked_fill(~present[:, :num_slots], -1)
    found = found.sort(dim=1, descending=True).values
    width = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :width] = found[:, :width]
