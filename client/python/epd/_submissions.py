"""Memory for arguments and results of operations, and why some arguments do not fit."""

from __future__ import annotations

import ctypes
import operator

from . import _abi
from .errors import InvalidArgument
from .memory import Memory
from .types import GroupConfig, ReturnWeights

DISPATCH = _abi.pack_format(_abi.DispatchArgs)
COMBINE = _abi.pack_format(_abi.CombineArgs)
RESULT = _abi.pack_format(_abi.Result)
UNTOUCHED = (1 << 64) - 1  # as op_index of a ResultBlock: the library has written no result


class ArgumentBlock:
    """Memory for the arguments of a submission, and for the ticket and handle that it gives."""

    __slots__ = ("address", "handle", "handle_address", "memory", "ticket", "ticket_address")

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(max(DISPATCH.size, COMBINE.size))
        self.address = ctypes.addressof(self.memory)
        self.ticket = ctypes.c_uint64()
        self.ticket_address = ctypes.addressof(self.ticket)
        self.handle = ctypes.c_uint64()
        self.handle_address = ctypes.addressof(self.handle)


class ResultBlock:
    """Memory for a result. A group keeps some, so that waiting makes none."""

    __slots__ = ("address", "memory", "op_index")

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(RESULT.size)
        self.address = ctypes.addressof(self.memory)
        self.op_index = ctypes.c_uint64.from_buffer(self.memory, _abi.Result.op_index.offset)
        ctypes.c_size_t.from_buffer(self.memory).value = RESULT.size


def foreign(given: GroupConfig, config: GroupConfig) -> InvalidArgument:
    """Why a handle of the group `given` is refused in the group with this config."""
    return InvalidArgument(
        f"handle is of a dispatch in group {given.name!r}; allowed: those of group {config.name!r}"
    )


def misfit(config: GroupConfig, error: Exception, **numbers: object) -> Exception:
    """Why numbers do not fit in a struct."""
    highest = {
        "slot": (config.depth or 4) - 1,
        "num_tokens": config.max_tokens,
        "num_tokens_at": (1 << 64) - 1,
        "num_biases": config.num_biases,
        "return_weights": max(ReturnWeights),
        "row_format": len(config.more_formats),
        "sms": (1 << 32) - 1,
        "timeout_ms": (1 << 31) - 1,
    }
    for name, value in numbers.items():
        most = highest.get(name, 1)  # of a flag 1
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return TypeError(f"{name} is {value!r}; allowed: {'an integer' if name in highest else 'True or False'}")
        if not 0 <= number <= most:
            return InvalidArgument(f"{name} is {number}; allowed: 0 .. {most}")
    return TypeError(str(error))


def no_object(memory: object, handle: object) -> TypeError:
    """Why an argument is not of its class."""
    if memory is None or isinstance(memory, Memory):
        return TypeError(f"handle is {handle!r}; allowed: None, or a Dispatch.handle")
    return TypeError(f"memory is {memory!r}; allowed: None, or a Memory")
