"""Numbers for tuning, and how much memory a Buffer is told to have."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields

import epd

from .checks import check_number, refuse
from .rows import LOW_LATENCY_ROWS


NAME = "EPD_DEEPEP_NAME"


def job_name() -> str:
    """How the daemon's groups are called; "": by random numbers."""
    given = os.environ.get(NAME, "")
    if not re.fullmatch(r"[\w.-]{0,32}", given, re.ASCII):
        raise refuse(f"${NAME}", repr(given), "up to 32 characters of [A-Za-z0-9._-]")
    return given


@dataclass(frozen=True)
class Config:
    """How many SMs normal operations may use. epd has no chunks: the other numbers are only kept."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 1 if field.name == "num_sms" else 0
            check_number(field.name, getattr(self, field.name), least, f"{least} or more")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the rows that DeepEP's buffers hold. The daemon makes the memory, by the shape of each group.

        hidden_bytes: of a bf16 row
        """
        check_number("hidden_bytes", hidden_bytes, 16, "a multiple of 16", multiple=16)
        check_number("num_ranks", num_ranks, 1, "1 or more")
        return (self.num_sms // 2) * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: the ranks are on one node."""
        return 0


def low_latency_bytes(tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of a rank that the daemon makes for a group in low-latency mode with one choice."""
    shape = epd.GroupConfig(
        num_ranks=num_ranks,
        num_experts=num_experts,
        max_tokens=tokens,
        hidden=hidden,
        topk=1,
        depth=2,
        layout=epd.Layout.EXPERT,
        scale_layout=epd.ScaleLayout.COLUMN_MAJOR,
        more_formats=LOW_LATENCY_ROWS[1:],
    )
    return shape.group_bytes(epd.DeviceKind.CUDA).rank
