"""Memory of the caller's own, in place of regions of a slot."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Optional

from . import _abi
from .errors import InvalidArgument


class Memory:
    """Memory for one operation, or for a layer's dispatch and its combine: epd_memory_t.

    Each argument is named for its region, has that region's type and row-major shape (see Buffers), and is None
    (the slot's region), an address, or an array: torch tensors, numpy arrays, DeviceArrays, or anything with the
    buffer protocol. Arrays are kept as long as this object, and it is kept by tickets.

    recv_rows  rows for which recv_* and y have room. Layout.EXPERT: of each expert's block, at least the
               group's. 0: the group's

    Token-wise arrays need the n rows of the operation; recv_* and y recv_rows rows. Nobody can check that: a
    shorter array is written beyond its end. epd.h has the whole contract.
    """

    __slots__ = ("__weakref__", "_arrays", "_raw", "address")

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
        if not 0 <= recv_rows < 1 << 32:
            raise InvalidArgument(f"recv_rows is {recv_rows}; allowed: 0 .. {(1 << 32) - 1}")
        raw = _abi.Memory(ctypes.sizeof(_abi.Memory))
        for name, array in inputs.items():
            setattr(raw, name, None if array is None else array_address("memory." + name, array, False))
        for name, array in outputs.items():
            setattr(raw, name, None if array is None else array_address("memory." + name, array, True))
        for i in range(2):
            raw.bias[i] = array_address(f"memory.bias[{i}]", bias[i], False)
        raw.recv_rows = recv_rows
        self._raw = raw
        self._arrays: Any = (inputs, outputs, bias)
        self.address = ctypes.addressof(raw)


def array_bytes(array: Any) -> int:
    """The bytes of an array whose elements lie close together. Raises InvalidArgument: it is an address."""
    if array is None or isinstance(array, int):
        raise InvalidArgument("bytes is None; allowed: a number, as memory is an address")
    if hasattr(array, "data_ptr"):
        return int(array.numel() * array.element_size())
    device = getattr(array, "__cuda_array_interface__", None)
    if device is not None:
        return math.prod(device["shape"]) * int(device["typestr"][2:])
    return memoryview(array).nbytes


def array_address(name: str, array: Any, written: bool) -> Optional[int]:
    """The address of an array's first element. Raises InvalidArgument: its elements do not lie close together,
    or it may not be written to. TypeError: it is no array."""
    if array is None:
        return None
    if isinstance(array, int):
        return array
    if hasattr(array, "data_ptr"):
        if not array.is_contiguous():
            raise InvalidArgument(f"{name} has strides {array.stride()}; allowed: contiguous tensors")
        address: int = array.data_ptr()
        return address or None
    device = getattr(array, "__cuda_array_interface__", None)
    if device is not None:
        if device.get("strides") is not None:
            raise InvalidArgument(f"{name} has strides {device['strides']}; allowed: contiguous arrays")
        return device["data"][0] or None
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(f"{name} is {array!r}; allowed: None, an address, or an array") from None
    if not view.c_contiguous:
        raise InvalidArgument(f"{name} has strides {view.strides}; allowed: contiguous arrays")
    if view.readonly and written:
        raise InvalidArgument(f"{name} is read-only; allowed: arrays that may be written to")
    if view.nbytes == 0:
        return None
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        return interface["data"][0] or None
    if view.readonly:
        raise InvalidArgument(f"{name} is read-only; allowed: numpy arrays, or arrays that may be written to")
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
