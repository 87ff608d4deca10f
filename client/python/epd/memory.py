"""Memory of the caller's own, in place of regions of a slot."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

from . import _abi
from ._arrays import Elements, array_address, array_elements, held, is_buffer
from ._handles import NotCopied
from ._shapes import RegionShape, SlotShapes
from .errors import InvalidArgument
from .types import DeviceKind, Layout, Payload, Region, ScaleLayout, integer

# The regions that an operation reads or writes.
_COUNTS = (Region.RANK_OFFSETS, Region.EXPERT_COUNTS, Region.EXPERT_OFFSETS, Region.SOURCE_RANGES)
_GIVEN = (Region.X, Region.X_SCALES, Region.TOPK_WEIGHTS)
_RECEIVED = (
    Region.RECV_X,
    Region.RECV_SCALES,
    Region.RECV_TOPK_IDX,
    Region.RECV_TOPK_WEIGHTS,
    Region.RECV_SRC,
)
_AGAIN = (*_GIVEN, *_RECEIVED, *_COUNTS)  # a dispatch under a handle
_DISPATCH = (*_AGAIN, Region.TOPK_IDX)
_COMBINE = (
    *(Region.Y, Region.Y_WEIGHTS, Region.TOPK_WEIGHTS, Region.BIAS_0, Region.BIAS_1),
    *(Region.OUT, Region.OUT_WEIGHTS, *_COUNTS),
)
OPERATIONS = {"dispatch": _DISPATCH, "dispatch again": _AGAIN, "combine": _COMBINE}

_BY_TOKEN = {*_GIVEN, Region.TOPK_IDX, Region.BIAS_0, Region.BIAS_1, Region.OUT, Region.OUT_WEIGHTS}
_SENT = (Region.Y, Region.Y_WEIGHTS)
_BY_ROW = {*_RECEIVED, *_SENT}

_TYPES = {
    "H": ("bfloat16", "uint16", "int16"),
    "B": ("uint8", "int8", "float8_e4m3fn"),
    "f": ("float32",),
    "i": ("int32", "uint32"),
    "q": ("int64", "uint64"),
}
_SIZES = {"H": 2, "B": 1, "f": 4, "i": 4, "q": 8}
_ANY_NUMBER = 1 << 32  # of tokens


class Memory(NotCopied):
    """Memory for one operation, or for a layer's dispatch and its combine: epd_memory_t.

    Each argument is named for its region, has that region's type and row-major shape (see Buffers), and is None
    (the slot's region), an address, or an array: torch tensors, numpy arrays, DeviceArrays, or anything with the
    buffer protocol. Arrays are kept as long as this object, and it is kept by tickets. Of a tensor the storage is
    kept that it has now: what is assigned to `tensor.data` later is not seen. Nobody may resize a storage
    (`tensor.resize_`), or an array of numpy's with refcheck=False, while this lives.

    recv_rows  rows for which recv_* and y have room. Layout.EXPERT: of each expert's block. 0: the group's

    Token-wise arrays need the n rows of the operation; recv_* and y recv_rows rows. Without recv_rows, y and y_weights
    of layouts compact and packed need only the rows that the dispatch has brought, once it was waited for. The first
    operation of a group with an object checks types and sizes of its arrays, and raises InvalidArgument. Addresses are
    trusted: memory that is too small is written beyond its end. An array without elements in place of recv_* or y is
    as None. epd.h has the whole contract.
    """

    __slots__ = ("__weakref__", "_arrays", "_checked", "_elements", "_held", "_raw", "_recv_rows", "_struct")

    def __init__(
        self,
        *,
        x: Any = None,
        x_scales: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        recv_x: Any = None,
        recv_scales: Any = None,
        recv_topk_idx: Any = None,
        recv_topk_weights: Any = None,
        recv_src: Any = None,
        rank_offsets: Any = None,
        expert_counts: Any = None,
        expert_offsets: Any = None,
        source_ranges: Any = None,
        y: Any = None,
        y_weights: Any = None,
        bias: tuple[Any, Any] = (None, None),
        out: Any = None,
        out_weights: Any = None,
        recv_rows: int = 0,
    ) -> None:
        inputs = {
            "x": x,
            "x_scales": x_scales,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "y": y,
            "y_weights": y_weights,
        }
        outputs = {
            "recv_x": recv_x,
            "recv_scales": recv_scales,
            "recv_topk_idx": recv_topk_idx,
            "recv_topk_weights": recv_topk_weights,
            "recv_src": recv_src,
            "rank_offsets": rank_offsets,
            "expert_counts": expert_counts,
            "expert_offsets": expert_offsets,
            "source_ranges": source_ranges,
            "out": out,
            "out_weights": out_weights,
        }
        recv_rows = integer("recv_rows", recv_rows)
        if not 0 <= recv_rows < 1 << 32:
            raise InvalidArgument(f"recv_rows is {recv_rows}; allowed: 0 .. {(1 << 32) - 1}")
        raw = _abi.Memory(ctypes.sizeof(_abi.Memory))
        arrays = {name: held("memory." + name, array) for name, array in {**inputs, **outputs}.items()}
        for name, array in arrays.items():
            setattr(raw, name, array_address("memory." + name, array, name in outputs))
        if not isinstance(bias, (tuple, list)) or len(bias) != 2:
            raise TypeError(f"memory.bias is {bias!r}; allowed: a pair, each None, an address, or an array")
        for i in range(2):
            name = f"memory.bias[{i}]"
            arrays[f"bias_{i}"] = array = held(name, bias[i])
            raw.bias[i] = array_address(name, array, False)
        raw.recv_rows = recv_rows
        self._raw = raw
        self._arrays: Any = arrays
        # As long as these live, an mmap can't be closed, and a bytearray keeps its size.
        self._held = [memoryview(array) for array in arrays.values() if is_buffer(array)]
        self._elements = {
            Region[name.upper()]: array_elements(array)
            for name, array in arrays.items()
            if array is not None and not isinstance(array, int)
        }
        self._recv_rows = recv_rows
        # Keys: operation and group's shapes. For how many tokens there is space, and how many rows to send back there
        # are. The shapes, so that they live.
        self._checked: dict[tuple[str, int], tuple[object, int, int]] = {}
        self._struct = ctypes.addressof(raw)

    def check(
        self, shapes: SlotShapes, operation: str, num_tokens: Optional[int], num_recv_rows: Optional[int]
    ) -> None:
        """Raises InvalidArgument: an array that the operation uses has another type, or is too small.

        num_tokens, num_recv_rows: of the operation, and of a combine's routing; None: not known here
        """
        found = self._checked.get((operation, id(shapes)))
        if found is None:
            room, rows = self._check_arrays(shapes, operation)
            found = self._checked[operation, id(shapes)] = (shapes, room, rows)
        if found[2] < _ANY_NUMBER and (num_recv_rows is None or num_recv_rows > found[2]):
            self._check_rows_sent(shapes.regions, num_recv_rows)
        if num_tokens is not None and num_tokens > found[1]:
            for region in OPERATIONS[operation]:
                elements = self._elements.get(region)
                if elements is not None and region in _BY_TOKEN and region in shapes.regions:
                    _check_bytes(region, elements, num_tokens, shapes.regions[region], f"num_tokens {num_tokens}")

    def _check_arrays(self, shapes: SlotShapes, operation: str) -> tuple[int, int]:
        """For how many tokens the operation's token-wise arrays have room. How many rows y and y_weights have, if that
        is fewer than the group's."""
        config = shapes.config
        room = rows = _ANY_NUMBER
        for region in OPERATIONS[operation]:
            elements, shape = self._elements.get(region), shapes.regions.get(region)
            if elements is None or shape is None:  # the library refuses what the group has not
                continue
            opaque = config.payload == Payload.OPAQUE and region in (Region.X, Region.RECV_X)
            _check_type(region, elements, None if opaque else _TYPES[shape.format])
            if elements.on_gpu and shapes.kind == DeviceKind.HOST:
                raise InvalidArgument(f"{_name(region)}.device is cuda; allowed: cpu, as the group is on a host device")
            if not elements.on_gpu and shapes.kind == DeviceKind.CUDA and not self._is_pinned(region):
                raise InvalidArgument(
                    f"{_name(region)}.device is cpu; allowed: cuda, pinned tensors, or an address that the GPU can "
                    "reach, as the group is on a CUDA device"
                )
            if region in _BY_TOKEN:
                room = min(room, elements.nbytes // _row_bytes(shape))
            elif region in _BY_ROW:
                if elements.nbytes == 0 and self._recv_rows == 0:
                    continue
                have = elements.nbytes // _row_bytes(shape)
                if region not in _SENT or self._recv_rows > 0 or config.layout == Layout.EXPERT:
                    self._check_rows(region, elements, shape, config)
                elif have < shape.shape[0]:
                    rows = min(rows, have)
            else:
                _check_bytes(region, elements, shape.elements, shape, "the group")
        return room, rows

    def _is_pinned(self, region: Region) -> bool:
        """Whether GPUs reach a tensor on the CPU, as torch knows."""
        array = self._arrays[region.name.lower()]
        return hasattr(array, "is_pinned") and bool(array.is_pinned())

    def _check_rows_sent(self, shapes: dict[Region, RegionShape], num_recv_rows: Optional[int]) -> None:
        """Without recv_rows as many rows are read as the routing has. If that is not known here, it may be all."""
        for region in _SENT:
            elements, shape = self._elements.get(region), shapes.get(region)
            if elements is not None and elements.nbytes > 0 and shape is not None:
                need, allowed_by = shape.shape[0], "the group's rows: recv_rows is 0, and the dispatch was not waited for"
                if num_recv_rows is not None:
                    need, allowed_by = num_recv_rows, f"the {num_recv_rows} rows that the dispatch has brought"
                _check_bytes(region, elements, need, shape, allowed_by)

    def _check_rows(self, region: Region, elements: Elements, shape: RegionShape, config: Any) -> None:
        """The count of received rows, or of answers to them."""
        room = shape.shape[-2]  # the group's; Layout.EXPERT: of a block
        expert = config.layout == Layout.EXPERT
        rows = self._recv_rows or room
        if not expert:
            rows = min(rows, room)
        if region == Region.RECV_SCALES and config.scale_layout == ScaleLayout.COLUMN_MAJOR:
            rows = -(-rows // 4) * 4
        blocks = shape.shape[0] if expert else 1
        allowed_by = f"recv_rows {self._recv_rows}" if self._recv_rows else "the group's rows, as recv_rows is 0"
        _check_bytes(region, elements, blocks * rows, shape, allowed_by)


def _name(region: Region) -> str:
    """The argument's name, for a sentence."""
    if region in (Region.BIAS_0, Region.BIAS_1):
        return f"memory.bias[{region - Region.BIAS_0}]"
    return "memory." + region.name.lower()


def _row_bytes(shape: RegionShape) -> int:
    """The bytes of a row; of one element where there are no rows."""
    return _SIZES[shape.format] * (shape.shape[-1] if len(shape.shape) > 1 else 1)


def _check_type(region: Region, elements: Elements, allowed: Optional[tuple[str, ...]]) -> None:
    if allowed is not None and elements.type is not None and elements.type not in allowed:
        raise InvalidArgument(f"{_name(region)}.dtype is {elements.type}; allowed: {', '.join(allowed)}")


def _check_bytes(region: Region, elements: Elements, rows: int, shape: RegionShape, allowed_by: str) -> None:
    counted = region not in _BY_TOKEN and region not in _BY_ROW
    need = rows * (_SIZES[shape.format] if counted else _row_bytes(shape))
    if elements.nbytes < need:
        text = f"{_name(region)}.nbytes is {elements.nbytes}; allowed: {need} or more"
        raise InvalidArgument(f"{text}, for {allowed_by}")
