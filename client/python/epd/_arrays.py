"""Arrays of the caller's: where they are, and what their elements are."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from typing import Any, NamedTuple, Optional

from .errors import InvalidArgument

# Elements by their format as in the module `struct`. Others are named as they are. Bytes may be any type.
_FORMATS: dict[str, Optional[str]] = {
    **{"B": None, "b": None, "c": None},
    **{"H": "uint16", "h": "int16", "e": "float16", "f": "float32", "d": "float64"},
}
_KINDS = {"i": "int", "u": "uint", "f": "float"}


def held(name: str, array: Any) -> Any:
    """An alias that stays valid whatever becomes of the object: None, an address, an array.

    Of a torch tensor an alias, which keeps the storage. Raises TypeError: a scalar of numpy's that is no integer."""
    if array is None or isinstance(array, int):
        return array
    if hasattr(array, "data_ptr"):
        return array.detach() if hasattr(array, "detach") else array
    scalars: Any = getattr(sys.modules.get("numpy"), "generic", ())
    if isinstance(array, scalars):
        # It says that it has memory, but it is that of a copy.
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} is {array!r}; allowed: None, an address, or an array")
        return operator.index(array)
    if any(hasattr(array, interface) for interface in ("__array_interface__", "__cuda_array_interface__")):
        return array
    return operator.index(array) if hasattr(array, "__index__") else array


class Elements(NamedTuple):
    """The elements of an array."""

    type: Optional[str]  # "bfloat16"; None: bytes without a type
    nbytes: int
    on_gpu: bool


def array_bytes(array: Any) -> int:
    """The bytes of an array whose elements lie close together. Raises InvalidArgument: it is an address."""
    if array is None or isinstance(array, int):
        raise InvalidArgument("bytes is None; allowed: a number, as memory is an address")
    return array_elements(array).nbytes


def array_elements(array: Any) -> Elements:
    """The elements of an array that array_address takes, and that is no address."""
    if hasattr(array, "data_ptr"):
        dtype = getattr(array, "dtype", None)
        name = None if dtype is None else str(dtype).rpartition(".")[2]
        return Elements(name, int(array.numel() * array.element_size()), _device_type(array) == "cuda")
    device = getattr(array, "__cuda_array_interface__", None)
    if device is not None:
        kind = device["typestr"]
        size = int(kind[2:])
        name = _KINDS[kind[1]] + str(8 * size) if kind[1] in _KINDS and kind[0] != ">" else kind
        return Elements(name, math.prod(device["shape"]) * size, True)
    dtype = getattr(array, "dtype", None)
    if dtype is not None:  # numpy's
        return Elements(dtype.name if dtype.isnative else str(dtype), array.nbytes, False)
    view = memoryview(array)
    return Elements(_buffer_type(view), view.nbytes, False)


def _buffer_type(view: memoryview) -> Optional[str]:
    """The type of elements in the machine's order: ctypes' arrays say "<", array's and bytearrays say nothing."""
    code = view.format
    if len(code) == 2 and code[0] in ("<@=" if sys.byteorder == "little" else ">@="):
        code = code[1]
    if code in ("i", "l", "q", "I", "L", "Q"):
        return f"{'int' if code.islower() else 'uint'}{8 * view.itemsize}"
    return _FORMATS.get(code, view.format)


def is_buffer(array: Any) -> bool:
    """Whether the memory of what array_address takes is known by the buffer protocol alone."""
    others = ("data_ptr", "__cuda_array_interface__")
    return not (array is None or isinstance(array, int) or any(hasattr(array, name) for name in others))


def _device_type(tensor: Any) -> Optional[str]:
    """The device kind of a torch tensor; None for another class with data_ptr."""
    kind: Optional[str] = getattr(getattr(tensor, "device", None), "type", None)
    return kind


def _contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in bytes of an array whose elements, of so many bytes, lie close together."""
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def array_address(name: str, array: Any, written: bool) -> Optional[int]:
    """The address of the first element of an array as `held` gives it; None of None, and of one without elements.

    Raises InvalidArgument: its elements do not lie close together, it may not be written to, or it has no memory.
    TypeError: it is no array."""
    if array is None:
        return None
    if isinstance(array, int):
        if isinstance(array, bool):
            raise TypeError(f"{name} is {array!r}; allowed: None, an address, or an array")
        if not 0 < array < 1 << 64:
            raise InvalidArgument(f"{name} is {array}; allowed: None, an address of 1 .. {(1 << 64) - 1}, or an array")
        return array
    if hasattr(array, "data_ptr"):
        if _device_type(array) not in ("cpu", "cuda", None):
            raise InvalidArgument(f"{name}.device is {array.device}; allowed: cpu, cuda")
        layout = str(getattr(array, "layout", "torch.strided"))
        if layout != "torch.strided":
            raise InvalidArgument(f"{name}.layout is {layout}; allowed: torch.strided")
        if not array.is_contiguous():
            raise InvalidArgument(f"{name} has strides {array.stride()}; allowed: contiguous tensors")
        if hasattr(array, "is_neg") and array.is_neg():
            raise InvalidArgument(f"{name}.is_neg() is True; allowed: {name}.resolve_neg()")
        address: int = array.data_ptr()
        return address or None
    device = getattr(array, "__cuda_array_interface__", None)
    if device is not None:
        if device.get("strides") not in (None, _contiguous(device["shape"], int(device["typestr"][2:]))):
            raise InvalidArgument(f"{name} has strides {device['strides']}; allowed: contiguous arrays")
        if device["data"][1] and written:
            raise InvalidArgument(f"{name} is read-only; allowed: arrays that may be written to")
        return device["data"][0] or None
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(f"{name} is {array!r}; allowed: None, an address, or an array") from None
    except ValueError as error:  # numpy's dates, a closed mmap
        raise InvalidArgument(f"{name} is an array without a buffer: {error}") from None
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
