"""The shapes of a slot's regions."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

from .types import DeviceKind, GroupConfig, IndexType, Layout, Payload, RangeFormat, Region, ScaleFormat, ScaleLayout


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


class SlotShapes(NamedTuple):
    """A slot's regions, as operations of one row format have them."""

    config: GroupConfig  # with that row format
    kind: DeviceKind
    regions: dict[Region, RegionShape]


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
