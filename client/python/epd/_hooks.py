"""The thread that calls completion hooks."""

from __future__ import annotations

import ctypes
import threading
from queue import SimpleQueue
from typing import Any, Callable, Optional


def run_hooks(queue: SimpleQueue[Any]) -> None:
    """The thread that calls hooks. Ends with a None in the queue, which the group's end puts there."""
    while True:
        item = queue.get()
        if item is None:
            return
        take, hook = item
        try:
            hook(take())
        except BaseException as error:  # noqa: B902
            show_unraisable(_Raise(error, hook))
        del item, take, hook  # so that the last hook does not keep the group


class _Raise:
    """Raises what a hook has raised, and shows as that hook."""

    def __init__(self, error: BaseException, hook: object) -> None:
        self._error: Optional[BaseException] = error
        self._hook = hook

    def __call__(self) -> None:
        error, self._error = self._error, None
        try:
            assert error is not None
            raise error
        finally:
            del error  # its traceback has this frame

    def __repr__(self) -> str:
        return f"the completion hook {self._hook!r}"


def show_unraisable(call: Callable[[], object]) -> None:
    """Runs a call that raises, and shows that by sys.unraisablehook.

    CPython's own hook takes nothing but what CPython makes. It makes that for what a callback of C raises.
    """
    ctypes.CFUNCTYPE(None)(call)()


def start_hooks() -> SimpleQueue[Any]:
    """A queue of (what gives the outcome, hook) and the thread that serves it."""
    queue: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=run_hooks, args=(queue,), name="epd-hooks", daemon=True).start()
    return queue
