"""bf16 and e4m3 as numpy knows them: conversions to and from float32. Needs numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def to_bf16(values: Array) -> Array:
    """float32 [...] to bf16 as uint16 [...], to nearest, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), quiet, rounded).astype(np.uint16)


def from_bf16(values: Array) -> Array:
    """bf16 as uint16 [...] to float32 [...], exactly."""
    floats: Array = (np.asarray(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return floats


def _e4m3_table() -> Array:
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> 3) & 0xF
    mantissa = codes & 7
    values = sign * np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(codes & 0x7F) == 0x7F] = np.nan
    table: Array = values.astype(np.float32)
    return table


_E4M3 = _e4m3_table()


def from_e4m3(values: Array) -> Array:
    """e4m3 as uint8 [...] to float32 [...], exactly; without scales."""
    floats: Array = _E4M3[np.asarray(values)]
    return floats


def dequantize(rows: Array, scales: Array) -> Array:
    """e4m3 rows [..., H] as uint8 times their float32 scales [..., ceil(H/128)], as float32 [..., H]."""
    values = from_e4m3(rows)
    floats: Array = values * np.repeat(np.asarray(scales), 128, axis=-1)[..., : values.shape[-1]]
    return floats
