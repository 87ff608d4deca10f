"""The row formats of the groups of each mode, by number."""

from __future__ import annotations

import epd

NORMAL_ROWS = (
    epd.RowFormat(epd.Payload.BF16),
    epd.RowFormat(epd.Payload.FP8, epd.ScaleFormat.FLOAT32),
    epd.RowFormat(epd.Payload.FP8, epd.ScaleFormat.UE8M0),
)
LOW_LATENCY_ROWS = (
    epd.RowFormat(epd.Payload.BF16),
    epd.RowFormat(epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32),
    epd.RowFormat(epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32_POW2),
    epd.RowFormat(epd.Payload.FP8_CAST, epd.ScaleFormat.UE8M0),
)
