"""How the tensors of a call get into the group's memory, and results out of it.

An operation is submitted between `Staging` and `finish`, all on one stream:

    staging = Staging(group, slot)
    staging.give(Region.X, x)                     # an input
    staging.want(Region.OUT, out)                 # an output whose size is known before the operation
    ticket = group.combine(slot, ..., **staging.keywords)
    staging.finish()                              # after the operation, in the stream's order
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..types import Region

if TYPE_CHECKING:
    from ..group import Group


class Staging:
    """Moves the tensors of one operation by torch's copies, on the current stream."""

    __slots__ = ("_regions", "_wanted")

    keywords: dict[str, Any] = {}  # of the submission

    def __init__(self, group: Group, slot: int) -> None:
        self._regions = group.tensors(slot)
        self._wanted: list[tuple[Tensor, Tensor]] = []

    def region(self, region: Region) -> Tensor:
        if region in (Region.BIAS_0, Region.BIAS_1):
            tensor = self._regions.bias[region - Region.BIAS_0]
        else:
            tensor = getattr(self._regions, region.name.lower())
        assert tensor is not None, f"the group has no region {region.name}"
        return tensor

    def give(self, region: Region, source: Tensor) -> None:
        """The region's first rows become the source, which may have any strides."""
        target = self.region(region)
        if source.numel() > 0 and not _is_there(source, target):
            target[: source.shape[0]].copy_(source)

    def want(self, region: Region, target: Tensor) -> None:
        """The target becomes the region's first rows, once the operation has ended."""
        self._wanted.append((target, self.region(region)))

    def finish(self) -> None:
        for target, source in self._wanted:
            if target.numel() > 0 and not _is_there(target, source):
                target.copy_(source[: target.shape[0]])


def _is_there(tensor: Tensor, region: Tensor) -> bool:
    """Whether a tensor is the region's first rows."""
    return tensor.data_ptr() == region.data_ptr() and tensor.is_contiguous()
