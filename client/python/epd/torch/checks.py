"""Checks of the tensors that a call takes. A refusal names the value and what is allowed."""

from __future__ import annotations

from typing import Optional, Sequence, Union

import torch
from torch import Tensor

from ..errors import InvalidArgument


def refuse(name: str, value: object, allowed: object) -> InvalidArgument:
    return InvalidArgument(f"{name} is {value}; allowed: {allowed}")


def check_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: Union[torch.dtype, Sequence[torch.dtype]],
    shape: Sequence[Optional[int]],
    device: torch.device,
) -> Tensor:
    """The tensor, if it has one of the types, the shape (None: any size) and is on the device."""
    if isinstance(tensor, Tensor):
        given = tensor.shape
        if tensor.dtype is dtypes and (given == shape or _fits(given, shape)) and tensor.device == device:
            return tensor  # the common case
    else:
        raise refuse(name, f"a {type(tensor).__name__}", "a tensor")
    if tensor.dtype != dtypes:
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        if tensor.dtype not in allowed:
            raise refuse(f"{name}.dtype", tensor.dtype, ", ".join(str(each) for each in allowed))
    if not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise refuse(f"{name}.shape", list(tensor.shape), f"[{wanted}]")
    if tensor.device != device:
        raise refuse(f"{name}.device", tensor.device, device)
    return tensor


def _fits(given: Sequence[int], shape: Sequence[Optional[int]]) -> bool:
    if len(given) != len(shape):
        return False
    for have, want in zip(given, shape):
        if want is not None and have != want:
            return False
    return True
