"""Refusals name the value and what is allowed."""

from __future__ import annotations

import epd
from epd.torch.checks import check_tensor, refuse

__all__ = ["check_tensor", "not_served", "refuse"]


def not_served(name: str, value: object, allowed: object) -> NotImplementedError:
    """Of what DeepEP has and epd has not."""
    return NotImplementedError(f"{name} is {value}; epd serves: {allowed}")


def refuse_capture(what: str) -> epd.Error:
    """A group can't be joined while a stream captures."""
    return epd.InvalidArgument(
        f"{what} is the first of its kind and the stream captures a graph; allowed: after one such call without"
    )
