"""The regions of a buffer slot as torch tensors, without copies."""

from __future__ import annotations

import torch
from torch import Tensor

from .._membership import Membership
from .._shapes import RegionShape
from ..buffers import Buffers, DeviceArray
from ..errors import InternalError
from ..types import DeviceKind, Payload, Region
from ._dynamo import breaks_graph, hide

# The type of e4m3 rows. torch before 2.1 has no such type, and takes the bytes.
E4M3: torch.dtype = getattr(torch, "float8_e4m3fn", torch.uint8)

_TYPES = {"H": torch.bfloat16, "f": torch.float32, "i": torch.int32, "q": torch.int64}


@breaks_graph
def region_tensors(group: Membership, slot: int, row_format: int) -> Buffers[Tensor]:
    """All regions of a slot, for dispatches of the row format. Each tensor keeps the membership."""
    hide()
    make = _host_tensors if group._kind == DeviceKind.HOST else _cuda_tensors
    with torch.inference_mode(False):  # they outlive the caller's mode
        return Buffers(make(group, slot, row_format))


def _element_type(group: Membership, shape: RegionShape) -> torch.dtype:
    if shape.format == "B":
        return torch.uint8 if group.config.payload == Payload.OPAQUE else E4M3
    return _TYPES[shape.format]


def _host_tensors(group: Membership, slot: int, row_format: int) -> dict[Region, Tensor]:
    def tensor(view: memoryview, shape: RegionShape) -> Tensor:
        flat = torch.frombuffer(view.cast("B"), dtype=torch.uint8)
        elements = flat.view(_element_type(group, shape))
        return elements.view(shape.shape) if shape.strides is None else elements.as_strided(shape.shape, shape.strides)

    shapes, views = group._shapes_of(row_format).regions, group._arrays(slot, row_format)
    return {region: tensor(view, shapes[region]) for region, view in views.items()}


def _cuda_tensors(group: Membership, slot: int, row_format: int) -> dict[Region, Tensor]:
    shapes, arrays = group._shapes_of(row_format).regions, group._arrays(slot, row_format)
    device = _device_of(arrays[Region.RANK_OFFSETS])
    return {
        region: torch.as_tensor(array, device=device).view(_element_type(group, shapes[region]))
        for region, array in arrays.items()
    }


def _device_of(array: DeviceArray) -> torch.device:
    """The GPU as torch numbers it: on another one as_tensor makes a copy."""
    count = torch.cuda.device_count()
    current = torch.cuda.current_device()
    for index in (current, *range(count)):
        device = torch.device("cuda", index)
        if torch.as_tensor(array, device=device).data_ptr() == array.address:
            return device
    raise InternalError(f"none of torch's {count} GPUs has the address {array.address:#x}")
