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
# Which rank a text is about: not the one whose operation ended, as in "operation 7 (dispatch, slot 0) of rank 0 ended".
_RANK = re.compile(r"(?:(?<!\) of )\brank |; missing: )(\d+)\b(?!,)")
_WITHIN = re.compile(r"\bwithin \d+ ms$")

CLASSES: dict[int, type[Error]] = {}


class Error(Exception):
    """A call failed. The classes below are the statuses; catch this one for all of them.

    Attributes:
        status: the Status.
        text: the library's sentence.
        rank: the rank that the status is about, or None.
        field, value, allowed: of a sentence "<field> is <value>; allowed: <allowed>", as text, else None.
    """

    status: Status = Status.INTERNAL

    def __init_subclass__(cls, status: Optional[Status] = None) -> None:
        super().__init_subclass__()
        if status is not None:
            cls.status = status
            CLASSES[status] = cls

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


class WouldBlock(Error, status=Status.WOULD_BLOCK):
    """No room now, or not finished: try again later."""


class InvalidArgument(Error, ValueError, status=Status.INVALID_ARGUMENT):
    """A value is not allowed, the object has ended, or it belongs to the process that forked this one."""


class NotFound(Error, status=Status.NOT_FOUND):
    """No such device, ticket or routing, for example because the ticket is retired."""


class PermissionDenied(Error, status=Status.PERMISSION_DENIED):
    """The daemon's access policy refuses this user."""


class ResourceExhausted(Error, status=Status.RESOURCE_EXHAUSTED):
    """A quota or limit, which the text names, or memory."""


class Unsupported(Error, status=Status.UNSUPPORTED):
    """This device, daemon or library can't do it."""


class VersionMismatch(Error, status=Status.VERSION_MISMATCH):
    """Library and daemon do not fit. The text names both versions."""


class DeadlineExceeded(Error, TimeoutError, status=Status.DEADLINE_EXCEEDED):
    """A wait's time is over and the ticket is still pending, or the operation's own deadline has passed."""


class RankLost(Error, status=Status.RANK_LOST):
    """A peer left or died: the group has ended, or goes on without it (Policy.DEGRADE)."""


class EngineRestarted(Error, status=Status.ENGINE_RESTARTED):
    """The device's engine died and is back: Group.resume(), then submit again."""


class DaemonLost(Error, status=Status.DAEMON_LOST):
    """The daemon has stopped or died: detach, attach and join again."""


class Aborted(Error, status=Status.ABORTED):
    """The operation was given up, for example because a lost rank has rejoined: Group.resume(), then submit again.

    If Session.check() raises too, an operator has ended the session: detach, attach and join again.
    """


class InternalError(Error, status=Status.INTERNAL):
    """An error of the system or the CUDA driver, which the text names, or a defect of epd."""


# Errors of submissions and operations that are to be repeated after Group.advance() or Group.resume().
BREAKS = (RankLost, DeadlineExceeded, EngineRestarted, Aborted)


def last_error(status: int, rank: Optional[int] = None, timeout_ms: int = 0) -> Error:
    """The exception of this thread's last call, which returned `status`.

    timeout_ms: of the whole wait, of which that call was the last part.
    """
    text = library.epd_last_error().decode("utf-8", "replace")
    if timeout_ms > 0 and status == Status.DEADLINE_EXCEEDED:
        text = _WITHIN.sub(f"within {timeout_ms} ms", text)
    return CLASSES.get(status, InternalError)(text, rank)


def check(status: int) -> None:
    """Raises the status unless it is OK."""
    if status:
        raise last_error(status)
