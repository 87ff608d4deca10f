"""The regions of a buffer slot as Python objects, without copies."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Optional, TypeVar

from . import _abi
from .types import GroupConfig, IndexType, Layout, Payload, RangeFormat, Region, ScaleFormat, ScaleLayout

if TYPE_CHECKING:
    import numpy

ArrayT = TypeVar("ArrayT")


class RegionShape(NamedTuple):
    """A region's shape, and the format of its elements as in the module `struct`."""

    shape: tuple[int, ...]
    format: str  # "H": bf16 as unsigned 16-bit; "B": e4m3 or opaque bytes; "f", "i", "q"
    strides: Optional[tuple[int, ...]] = None  # in elements; None: row-major

    @property
    def elements(self) -> int:
        """How many there are in memory, with those between columns."""
        if self.strides is None:
            return math.prod(self.shape)
        return max(count * stride for count, stride in zip(self.shape, self.strides))


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


def region_shapes(config: GroupConfig) -> dict[Region, RegionShape]:
    """The shape of each region that such a group has, in one slot. Raises InvalidArgument."""
    tokens, hidden, topk = config.max_tokens, config.hidden, config.topk
    total_rows = config.region_bytes(Region.RECV_SRC) // 8
    local = config.num_experts // config.num_ranks
    rows = (local, total_rows // local) if config.layout == Layout.EXPERT else (total_rows,)
    columns = topk if config.layout == Layout.COMPACT else 1
    index = "q" if config.index_type == IndexType.INT64 else "i"
    if config.scale_format == ScaleFormat.UE8M0:
        scales, scale = -(-hidden // 512), "i"
    else:
        scales, scale = -(-hidden // 128), "f"
    strides: Optional[tuple[int, ...]] = None
    if config.scale_layout == ScaleLayout.COLUMN_MAJOR:
        pitch = -(-rows[-1] // 4) * 4
        strides = (scales * pitch, 1, pitch) if config.layout == Layout.EXPERT else (1, pitch)
    packed = config.range_format == RangeFormat.PACKED64
    width = config.opaque_bytes if config.payload == Payload.OPAQUE else hidden
    given = "H" if config.payload in (Payload.BF16, Payload.FP8_CAST) else "B"
    received = "H" if config.payload == Payload.BF16 else "B"
    shapes = {
        Region.X: RegionShape((tokens, width), given),
        Region.X_SCALES: RegionShape((tokens, scales), scale),
        Region.TOPK_IDX: RegionShape((tokens, topk), index),
        Region.TOPK_WEIGHTS: RegionShape((tokens, topk), "f"),
        Region.RECV_X: RegionShape((*rows, width), received),
        Region.RECV_SCALES: RegionShape((*rows, scales), scale, strides),
        Region.RECV_TOPK_IDX: RegionShape((*rows, columns), index),
        Region.RECV_TOPK_WEIGHTS: RegionShape((*rows, columns), "f"),
        Region.RECV_SRC: RegionShape((*rows, 2), "i"),
        Region.RANK_OFFSETS: RegionShape((config.num_ranks + 1,), "i"),
        Region.EXPERT_COUNTS: RegionShape((local,), "i"),
        Region.EXPERT_OFFSETS: RegionShape((local + 1,), "i"),
        Region.SOURCE_RANGES: (
            RegionShape((local, config.num_ranks), "q")
            if packed
            else RegionShape((local, config.num_ranks, 2), "i")
        ),
        Region.Y: RegionShape((*rows, hidden), "H"),
        Region.Y_WEIGHTS: RegionShape((*rows, columns), "f"),
        Region.BIAS_0: RegionShape((tokens, hidden), "H"),
        Region.BIAS_1: RegionShape((tokens, hidden), "H"),
        Region.OUT: RegionShape((tokens, hidden), "H"),
        Region.OUT_WEIGHTS: RegionShape((tokens, topk), "f"),
    }
    return {region: shape for region, shape in shapes.items() if config.region_bytes(region) > 0}


def region_address(raw: _abi.Buffers, region: Region) -> int:
    """Where a region is; 0 if it is not there."""
    if region in (Region.BIAS_0, Region.BIAS_1):
        return raw.bias[region - Region.BIAS_0] or 0
    return getattr(raw, region.name.lower()) or 0


def host_view(address: int, count: int, kind: str, owner: object, writable: bool = True) -> memoryview:
    """`count` elements of a format at an address. The view, and all that is made from it, keeps `owner`."""
    memory: Any = (_ELEMENTS[kind] * count).from_address(address)
    memory.owner = owner
    view = memoryview(memory).cast("B").cast(kind)
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
