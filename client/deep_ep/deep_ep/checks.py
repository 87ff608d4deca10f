"""Refusals name the value and what is allowed."""

from __future__ import annotations

import operator
from typing import TypeVar

import epd
from epd.torch.checks import check_tensor, refuse

__all__ = ["check_kind", "check_number", "check_tensor", "not_served", "refuse"]

_Kind = TypeVar("_Kind")


def check_number(name: str, value: object, least: int, allowed: str, multiple: int = 1) -> int:
    """The value as an int, if it is an integer, no bool, that is not below `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or number % multiple != 0:
        raise refuse(name, value, allowed)
    return number


def check_kind(name: str, value: object, kind: type[_Kind], allowed: str) -> _Kind:
    """The value, if it is of the class."""
    if not isinstance(value, kind):
        raise refuse(name, f"a {type(value).__name__}", allowed)
    return value


def not_served(name: str, value: object, allowed: object) -> NotImplementedError:
    """The error for a value that DeepEP serves and epd does not."""
    return NotImplementedError(f"{name} is {value}; epd serves: {allowed}")


def refuse_capture(what: str) -> epd.Error:
    """A group can't be joined while a stream captures."""
    return epd.InvalidArgument(
        f"{what} is the first of its kind and the stream captures a graph; allowed: after one such call without"
    )
