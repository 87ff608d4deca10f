"""The regions of a buffer slot as Python objects, without copies."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Generic, Optional, TypeVar

from . import _abi
from ._shapes import RegionShape
from .types import Region

if TYPE_CHECKING:
    import numpy

ArrayT = TypeVar("ArrayT")


class DeviceArray:
    """A region in a GPU's memory: its address, shape and type. torch and cupy take it without a copy.

    `strides` are in elements; None: row-major.

    torch.as_tensor(array, device="cuda:0") keeps the array, and so the group, alive. bf16 comes as int16: add
    .view(torch.bfloat16). e4m3 and opaque rows come as uint8.
    """

    __slots__ = ("__weakref__", "_owner", "address", "format", "shape", "strides")

    _TYPES = {"H": "<i2", "B": "|u1", "f": "<f4", "i": "<i4", "q": "<i8"}

    def __init__(self, address: int, region: RegionShape, owner: object) -> None:
        self.address = address
        self.shape = region.shape
        self.format = region.format
        self.strides = region.strides
        self._owner = owner

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ctypes.sizeof(_ELEMENTS[self.format])

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        size = ctypes.sizeof(_ELEMENTS[self.format])
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self._TYPES[self.format],
            "data": (self.address, False),
            "strides": None if self.strides is None else tuple(stride * size for stride in self.strides),
            "stream": None,  # epd orders nothing by this protocol: tickets and streams do
        }

    def __repr__(self) -> str:
        return f"DeviceArray(address={self.address:#x}, shape={self.shape}, format={self.format!r})"


_ELEMENTS: dict[str, Any] = {
    "H": ctypes.c_uint16,
    "B": ctypes.c_uint8,
    "f": ctypes.c_float,
    "i": ctypes.c_int32,
    "q": ctypes.c_int64,
}


class Buffers(Generic[ArrayT]):
    """The regions of one buffer slot, shared with the engine: nothing is copied.

    T = max_tokens, H = hidden, K = topk, R = num_ranks, L = E/R local experts. `rows` is the room for received
    rows: (N,), or for Layout.EXPERT (L, N/L). C = K (compact) or 1. A region that the group does not have is
    None.

    memoryviews and numpy have no bf16 and no e4m3: there such a region has the bits, as uint16 or uint8. Write
    `b.x[:] = epd.numbers.to_bf16(values)`; `b.x[:] = values` would truncate the values and store them as bits.

    x                  in   [T, H] bf16 (BF16, FP8_CAST) or e4m3 (FP8), or [T, opaque_bytes] bytes
    x_scales           in   [T, S], see ScaleFormat; FP8 only
    topk_idx           in   [T, K] int32 or int64; negative: no selection
    topk_weights       in   [T, K] float32
    recv_x             out  [rows, H] bf16 or e4m3, or [rows, opaque_bytes]
    recv_scales        out  [rows, S]; FP8_CAST and FP8. COLUMN_MAJOR: the same shape with strides (1, P) of
                            elements, for EXPERT (S * P, 1, P): P is the rows of a block, rounded up to 4
    recv_topk_idx      out  [rows, C] local expert numbers, -1 elsewhere
    recv_topk_weights  out  [rows, C] float32, 0 elsewhere
    recv_src           out  [rows, 2] int32: source rank, token there
    rank_offsets       out  [R+1] int32: tokens from rank r are [r]..[r+1]; compact: its rows
    expert_counts      out  [L] int32
    expert_offsets     out  [L+1] int32; not compact
    source_ranges      out  [L, R, 2] int32: first row, number of rows of (expert, source rank), or [L, R]
                            int64 (RangeFormat); not compact
    y                  in   [rows, H] bf16: the input of combine
    y_weights          in   [rows, C] float32: for combine's return_weights
    bias               in   a pair of [T, H] bf16; None beyond num_biases
    out                out  [T, H] bf16
    out_weights        out  [T, K] float32

    An input may be written until the operation that reads it is submitted, and again when that has ended. An
    output is valid from the operation's end until the slot's next operation is submitted.
    """

    x: ArrayT
    x_scales: Optional[ArrayT]
    topk_idx: ArrayT
    topk_weights: ArrayT
    recv_x: ArrayT
    recv_scales: Optional[ArrayT]
    recv_topk_idx: ArrayT
    recv_topk_weights: ArrayT
    recv_src: ArrayT
    rank_offsets: ArrayT
    expert_counts: ArrayT
    expert_offsets: Optional[ArrayT]
    source_ranges: Optional[ArrayT]
    y: ArrayT
    y_weights: ArrayT
    bias: tuple[Optional[ArrayT], Optional[ArrayT]]
    out: ArrayT
    out_weights: ArrayT

    def __init__(self, arrays: dict[Region, ArrayT]) -> None:
        for region in Region:
            if region not in (Region.BIAS_0, Region.BIAS_1):
                setattr(self, region.name.lower(), arrays.get(region))
        self.bias = (arrays.get(Region.BIAS_0), arrays.get(Region.BIAS_1))


def region_address(raw: _abi.Buffers, region: Region) -> int:
    """Where a region is; 0 if it is not there."""
    if region in (Region.BIAS_0, Region.BIAS_1):
        return raw.bias[region - Region.BIAS_0] or 0
    return getattr(raw, region.name.lower()) or 0


def host_view(address: int, region: RegionShape, owner: object, writable: bool = True) -> memoryview:
    """The elements of a region, flat. The view, and all that is made from it, keeps `owner`."""
    memory: Any = (_ELEMENTS[region.format] * region.elements).from_address(address)
    memory.owner = owner
    view = memoryview(memory).cast("B").cast(region.format)
    return view if writable else view.toreadonly()


_DTYPES = {"H": "u2", "B": "u1", "f": "f4", "i": "i4", "q": "i8"}


def numpy_array(view: memoryview, region: RegionShape) -> numpy.ndarray[Any, Any]:
    """The region as an array that keeps what the view keeps."""
    import numpy

    flat = numpy.frombuffer(view, dtype=_DTYPES[region.format])
    if region.strides is None:
        return flat.reshape(region.shape)
    strides = [stride * flat.itemsize for stride in region.strides]
    return numpy.lib.stride_tricks.as_strided(flat, region.shape, strides)
