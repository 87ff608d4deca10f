"""What tensors a call takes. A refusal names the value and what is allowed."""

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
    if not isinstance(tensor, Tensor):
        raise refuse(name, f"a {type(tensor).__name__}", "a tensor")
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in allowed:
        raise refuse(f"{name}.dtype", tensor.dtype, ", ".join(str(each) for each in allowed))
    fits = tensor.dim() == len(shape) and all(w is None or w == h for w, h in zip(shape, tensor.shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise refuse(f"{name}.shape", list(tensor.shape), f"[{wanted}]")
    if tensor.device != device:
        raise refuse(f"{name}.device", tensor.device, device)
    return tensor
