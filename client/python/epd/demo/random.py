"""Counter-based pseudo-random numbers, as in client/tools/kit/random.h."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy's types of operators differ from version to version

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SQRT3 = np.float32(np.sqrt(np.float32(3.0)))


def mix64(x: int) -> int:
    """Bijective mixing of 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix64_array(x: Array) -> Array:
    """mix64 of each element; uint64 [...]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive(seed: int, part: int) -> int:
    """A seed for a part of something seeded."""
    return mix64((seed + GOLDEN * (part + 1)) & _MASK)


def normals(seed: int, count: int, skip: int = 0) -> Array:
    """Values skip .. skip+count of a stream, near enough to normal: float32 [count], mean 0, variance 1."""
    steps = np.arange(skip + 1, skip + count + 1, dtype=np.uint64)
    bits = mix64_array(np.uint64(mix64(seed)) + steps * np.uint64(GOLDEN))
    low = np.uint64(0xFFFF)
    sums = (
        (bits & low) + (bits >> np.uint64(16) & low) + (bits >> np.uint64(32) & low) + (bits >> np.uint64(48))
    )
    return (sums.astype(np.float32) * np.float32(2.0**-16) - np.float32(2.0)) * np.float32(1.7320508)


def uniforms(seed: int, count: int, deviation: np.float32) -> Array:
    """float32 [count] uniform with a standard deviation. count: a multiple of 4."""
    steps = np.arange(0, count, 4, dtype=np.uint64)
    words = mix64_array(np.uint64(mix64(seed)) + steps * np.uint64(GOLDEN))
    shifts = np.arange(0, 64, 16, dtype=np.uint64)
    values = (words[:, None] >> shifts & np.uint64(0xFFFF)).astype(np.float32)
    factor = np.float32(deviation) * _SQRT3 / np.float32(32768.0)
    return (factor * (values - np.float32(32767.5))).reshape(-1)
