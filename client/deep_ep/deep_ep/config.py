"""Numbers for tuning, and how much memory a Buffer is told to have."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import NamedTuple

import epd

from .checks import check_number, refuse
from .rows import LOW_LATENCY_ROWS, NORMAL_ROWS


MAX_TOKENS, HANDLES = "EPD_DEEPEP_MAX_TOKENS", "EPD_DEEPEP_HANDLES"
NAME = "EPD_DEEPEP_NAME"


class Settings(NamedTuple):
    """What the environment says of groups in normal mode. The same on all ranks."""

    max_tokens: int
    num_handles: int


def settings() -> Settings:
    return Settings(max_tokens(), num_handles())


def check_alike(of_ranks: list[Settings]) -> None:
    for name, values in zip((MAX_TOKENS, HANDLES), zip(*of_ranks)):
        if len(set(values)) > 1:
            given = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise refuse(f"${name}", given, "one value on all ranks")


def max_tokens() -> int:
    """The most tokens of a rank in normal mode."""
    return _from_environment(MAX_TOKENS, 8192, 65536)


def num_handles() -> int:
    """The most handles of normal dispatches that live at one time, of each group."""
    return _from_environment(HANDLES, 256, 4096)


def job_name() -> str:
    """How the daemon's groups are called; "": by random numbers."""
    given = os.environ.get(NAME, "")
    if not re.fullmatch(r"[\w.-]{0,32}", given, re.ASCII):
        raise refuse(f"${NAME}", repr(given), "up to 32 characters of [A-Za-z0-9._-]")
    return given


def _from_environment(name: str, default: int, most: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise refuse(f"${name}", repr(text), f"1 .. {most}")
    return int(text)


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
        """Bytes of a rank that the daemon makes for a group in normal mode with one choice.

        hidden_bytes: of a bf16 row
        """
        check_number("hidden_bytes", hidden_bytes, 16, "a multiple of 16", multiple=16)
        shape = epd.GroupConfig(
            num_ranks=num_ranks,
            num_experts=num_ranks,
            max_tokens=max_tokens(),
            hidden=hidden_bytes // 2,
            topk=1,
            depth=1,
            num_handles=num_handles(),
            more_formats=NORMAL_ROWS[1:],
        )
        return shape.group_bytes(epd.DeviceKind.CUDA).rank

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
