"""The tensors of one operation, as the memory that it uses in place of regions (epd_memory_t).

    staging = Staging()
    staging.give(Region.X, x)                # an input
    staging.want(Region.OUT, out)            # an output
    ticket = group.combine(slot, ..., memory=staging)
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from .. import _abi
from ..memory import Memory
from ..types import Region

_BYTES = ctypes.sizeof(_abi.Memory)
_FIELDS = {region: region.name.lower() for region in Region}


class Staging(Memory):
    """Memory for one operation. libepd copies; a ticket keeps this, and this keeps the tensors.

    recv_rows  rows of the tensors given for recv_* and y; 0: as many as the group has room for
    """

    __slots__ = ()

    def __init__(self, recv_rows: int = 0) -> None:
        self._raw = _abi.Memory(_BYTES)
        self._raw.recv_rows = recv_rows
        self._arrays: Any = []
        self.address = ctypes.addressof(self._raw)

    def give(self, region: Region, source: Tensor) -> None:
        """An input: its first rows. It may have any strides."""
        self._set(region, source.contiguous())

    def want(self, region: Region, target: Tensor) -> None:
        """An output, which is contiguous: its first rows are written."""
        self._set(region, target)

    def _set(self, region: Region, tensor: Tensor) -> None:
        address = tensor.data_ptr() or None  # of an empty tensor: the region, of which nothing is used either
        if region == Region.BIAS_0 or region == Region.BIAS_1:
            self._raw.bias[region - Region.BIAS_0] = address
        else:
            setattr(self._raw, _FIELDS[region], address)
        self._arrays.append(tensor)
