"""Calls that block for long, so that Ctrl-C ends them.

The interpreter takes a signal in the main thread, between two calls of the library. So a wait in the main thread
is made of short waits. A join can't be made of short joins: it runs on a thread of its own.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Callable, Optional, TypeVar

from . import _abi
from .errors import Status

ResultT = TypeVar("ResultT")

SLICE_MS = 200  # a wait that ends within this is one call
# An operation's deadline, where the caller has given none and the daemon's timeouts.operation_ms is not set.
OPERATION_MS = 30_000


def first_slice(timeout_ms: int) -> int:
    """The timeout_ms with which a wait begins."""
    return SLICE_MS if timeout_ms > SLICE_MS or -1 <= timeout_ms <= 0 else timeout_ms


def go_on(
    call: Callable[[int], int],
    timeout_ms: int,
    forever_ms: int = _abi.FOREVER,
    ended: Optional[Callable[[], bool]] = None,
) -> int:
    """The status of a wait that has not ended within first_slice(timeout_ms).

    call        the wait with a timeout_ms, which gives a status
    forever_ms  the library ends a wait without end some time after this; FOREVER: it does not
    ended       tells whether DEADLINE_EXCEEDED is the operation's own, which another call would not tell again
    """
    forever = timeout_ms in (_abi.FOREVER, 0)
    if threading.current_thread() is not threading.main_thread():
        return call(_abi.FOREVER if forever else max(timeout_ms - SLICE_MS, 1))
    limit = forever_ms if forever else timeout_ms
    begin = time.monotonic()
    end = math.inf if limit == _abi.FOREVER else begin + (limit - SLICE_MS) / 1000
    while True:
        left_ms = 1000 * (end - begin)
        if left_ms <= SLICE_MS:
            return call(_abi.FOREVER if forever else max(math.ceil(left_ms), 1))
        status = call(SLICE_MS)
        if status != Status.DEADLINE_EXCEEDED or (ended is not None and ended()):
            return status
        before, begin = begin, time.monotonic()
        if 1000 * (begin - before) < SLICE_MS:
            return status  # it is not this wait's time that is over


def on_a_thread(call: Callable[[], ResultT], name: str) -> ResultT:
    """Returns call()'s result.

    In the main thread Ctrl-C ends this at once. Then the call goes on, and what it gives is dropped.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    done = threading.Lock()
    results: list[ResultT] = []
    errors: list[BaseException] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: B902
            errors.append(error)
        if given_up.is_set():
            results.clear()
            errors.clear()
        done.release()

    done.acquire()
    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        done.acquire()
    except BaseException:
        given_up.set()
        results.clear()  # the traceback keeps the list
        errors.clear()
        raise
    if errors:
        raise errors.pop()
    return results.pop()
