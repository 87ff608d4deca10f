"""From text to hidden states, as in client/tools/demo/text.h."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from .random import uniforms

Array = np.ndarray[Any, Any]

_PIECE_LETTERS = 5
_COMMON_SEED = 0xC0FFEE  # a direction that all pieces share
_SPACE = b" \t\n\v\f\r"

# The C library's functions: numpy's own differ in the last bit.
_libm = ctypes.CDLL("libm.so.6")
for _name in ("expf", "sinf", "cosf"):
    getattr(_libm, _name).restype = ctypes.c_float
    getattr(_libm, _name).argtypes = (ctypes.c_float,)
expf, sinf, cosf = _libm.expf, _libm.sinf, _libm.cosf
_libm.pow.restype = ctypes.c_double
_libm.pow.argtypes = (ctypes.c_double, ctypes.c_double)


def split_into_pieces(text: bytes) -> list[bytes]:
    """Lower-cased words in pieces of at most five letters, later ones with '#' in front; marks one by one."""
    pieces: list[bytes] = []
    inside = False
    for byte in text:
        one = bytes((byte,))
        if one in _SPACE:
            inside = False
        elif one.isalpha() or byte >= 0x80:
            if not inside:
                pieces.append(b"")
            elif len(pieces[-1]) - pieces[-1].startswith(b"#") >= _PIECE_LETTERS:
                pieces.append(b"#")
            pieces[-1] += one.lower()
            inside = True
        else:
            pieces.append(one)
            inside = False
    return pieces


def _hash(text: bytes) -> int:
    value = 0xCBF29CE484222325  # FNV-1a
    for byte in text:
        value = ((value ^ byte) * 0x100000001B3) & ((1 << 64) - 1)
    return value


@functools.lru_cache(maxsize=1024)
def _stream(seed: int, weight: float, hidden: int) -> Array:
    values: Array = uniforms(seed, hidden, np.float32(weight))
    return values


def _add_stream(seed: int, weight: np.float32, shift: int, out: Array) -> None:
    out += np.roll(_stream(seed, float(weight), len(out)), shift)


def _add_piece(piece: bytes, weight: float, shift: int, out: Array) -> None:
    """The piece itself, its letter triples, and what all pieces have in common."""
    share = np.float32(0.5) * np.float32(weight)
    _add_stream(_hash(piece), np.float32(weight), shift, out)
    framed = b"<" + piece + b">"
    share = share / np.sqrt(np.float32(len(framed) - 2))
    for i in range(len(framed) - 2):
        _add_stream(_hash(framed[i : i + 3]), share, shift, out)
    _add_stream(_COMMON_SEED, np.float32(0.6) * np.float32(weight), shift, out)


def _add_position(place: int, out: Array) -> None:
    angles = np.fmod(place * _rates(len(out)), 6.283185307179586).tolist()
    weight = np.float32(0.15)
    out[0::2] += weight * np.array([sinf(angle) for angle in angles], np.float32)
    out[1::2] += weight * np.array([cosf(angle) for angle in angles], np.float32)


@functools.lru_cache(maxsize=1)
def _rates(hidden: int) -> Array:
    return np.array([_libm.pow(10000.0, -float(i) / hidden) for i in range(0, hidden, 2)])


def rms_normalize(values: Array) -> None:
    """Scales each row of float32 [n, H] to root mean square 1. The sum is in order, in float64."""
    sums = np.cumsum(values.astype(np.float64) ** 2, axis=1)[:, -1]
    factors = (1.0 / np.sqrt(sums / values.shape[1] + 1e-6)).astype(np.float32)
    values *= factors[:, None]


def embed(pieces: list[bytes], place: int, hidden: int) -> Array:
    """float32 [H]: pieces[place], mixed with the two pieces before it and the position; root mean square 1."""
    out = np.zeros(hidden, np.float32)
    _add_piece(pieces[place], 1.0, 0, out)
    if place >= 1:
        _add_piece(pieces[place - 1], 0.45, 4, out)
    if place >= 2:
        _add_piece(pieces[place - 2], 0.2, 8, out)
    _add_position(place, out)
    rms_normalize(out[None, :])
    return out
