"""One exception class for each status of epd.h."""

from __future__ import annotations

import enum
import re
from typing import Optional

from ._library import library


class Status(enum.IntEnum):
    """epd_status_t."""

    OK = 0
    WOULD_BLOCK = 1
    INVALID_ARGUMENT = 2
    NOT_FOUND = 3
    PERMISSION_DENIED = 4
    RESOURCE_EXHAUSTED = 5
    UNSUPPORTED = 6
    VERSION_MISMATCH = 7
    DEADLINE_EXCEEDED = 8
    RANK_LOST = 9
    ENGINE_RESTARTED = 10
    DAEMON_LOST = 11
    ABORTED = 12
    INTERNAL = 13


_SENTENCE = re.compile(r"(?P<field>.+?) is (?P<value>.+?); allowed: (?P<allowed>.+)", re.DOTALL)
_RANK = re.compile(r"(?:\brank |; missing: )(\d+)\b(?!,)")


class Error(Exception):
    """A call failed. The classes below are the statuses; catch this one for all of them.

    Attributes:
        status: the Status.
        text: the library's sentence.
        rank: the rank that the status is about, or None.
        field, value, allowed: of a sentence "<field> is <value>; allowed: <allowed>", as text, else None.
    """

    status: Status = Status.INTERNAL

    def __init__(self, text: str, rank: Optional[int] = None) -> None:
        super().__init__(f"{self.status.name}: {text}")
        self.text = text
        if rank is None:
            ranks = set(_RANK.findall(text))
            rank = int(ranks.pop()) if len(ranks) == 1 else None
        self.rank = rank
        sentence = _SENTENCE.fullmatch(text)
        self.field: Optional[str] = sentence["field"] if sentence else None
        self.value: Optional[str] = sentence["value"] if sentence else None
        self.allowed: Optional[str] = sentence["allowed"] if sentence else None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text, self.rank)


class WouldBlock(Error):
    """No room now, or not finished: try again later."""

    status = Status.WOULD_BLOCK


class InvalidArgument(Error, ValueError):
    """A value is not allowed, the object has ended, or it belongs to the process that forked this one."""

    status = Status.INVALID_ARGUMENT


class NotFound(Error):
    """A device, a ticket that is retired, or a handle that is stale."""

    status = Status.NOT_FOUND


class PermissionDenied(Error):
    """The daemon's access policy says no."""

    status = Status.PERMISSION_DENIED


class ResourceExhausted(Error):
    """A quota or limit of the daemon."""

    status = Status.RESOURCE_EXHAUSTED


class Unsupported(Error):
    """This device, daemon or library can't do it."""

    status = Status.UNSUPPORTED


class VersionMismatch(Error):
    """Library and daemon do not fit together; the text names both versions."""

    status = Status.VERSION_MISMATCH


class DeadlineExceeded(Error, TimeoutError):
    """A wait's time is over and the ticket is still pending, or the operation's own deadline has passed."""

    status = Status.DEADLINE_EXCEEDED


class RankLost(Error):
    """A peer left or died: the group has ended, or goes on without it (Policy.DEGRADE)."""

    status = Status.RANK_LOST


class EngineRestarted(Error):
    """The device's engine died and is back: Group.resume(), then submit again."""

    status = Status.ENGINE_RESTARTED


class DaemonLost(Error):
    """The daemon is gone: detach and attach again."""

    status = Status.DAEMON_LOST


class Aborted(Error):
    """The operation was given up, for example because a lost rank has rejoined."""

    status = Status.ABORTED


class InternalError(Error):
    """A defect, or an error of the CUDA driver, which the text names."""

    status = Status.INTERNAL


CLASSES: dict[int, type[Error]] = {
    kind.status: kind
    for kind in (
        WouldBlock,
        InvalidArgument,
        NotFound,
        PermissionDenied,
        ResourceExhausted,
        Unsupported,
        VersionMismatch,
        DeadlineExceeded,
        RankLost,
        EngineRestarted,
        DaemonLost,
        Aborted,
        InternalError,
    )
}


def last_error(status: int, rank: Optional[int] = None) -> Error:
    """The exception of this thread's last call, which returned `status`."""
    text = library.epd_last_error().decode("utf-8", "replace")
    return CLASSES.get(status, InternalError)(text, rank)


def check(status: int) -> None:
    """Raises the status unless it is OK."""
    if status:
        raise last_error(status)
