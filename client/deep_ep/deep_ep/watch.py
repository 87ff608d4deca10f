"""A thread that makes operations again after a break while the caller is elsewhere, as in a collective."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from typing import Any, Callable

import torch

_LOOK_S = 0.1
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_PATIENCE_S = 1.0  # with what it is making again, at the interpreter's end


class Watch:
    """The watch of one group with Steps. Each has a thread: ranks that repeat operations of two groups in other orders
    would wait for each other."""

    def __init__(self, look: Callable[[Any], None], device: torch.device) -> None:
        """look: a method of the group, which is not kept. It gets the thread's stream, None on host devices."""
        self._stop = threading.Event()
        arguments = (weakref.WeakMethod(look), device, self._stop)
        self._thread = threading.Thread(target=_watch, args=arguments, name="deep_ep-watch", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._stop, self._thread)  # before the session ends, at the interpreter's end too

    def stop(self) -> None:
        """Waits for what it is making again."""
        self._stop.set()
        self._thread.join()


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)


def _ignore_captures() -> None:
    """Else CUDA forbids some calls to this thread while another one captures a graph, and ends the capture."""
    mode = ctypes.c_int(_THREAD_LOCAL)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _watch(method: weakref.WeakMethod[Any], device: torch.device, stop: threading.Event) -> None:
    stream: Any = None
    current: Any = contextlib.nullcontext()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _ignore_captures()
        stream = torch.cuda.Stream(device)
        current = torch.cuda.stream(stream)
    told = False
    with current:
        while not stop.wait(_LOOK_S):
            look = method()
            if look is None:
                return
            try:
                look(stream)
            except Exception as error:  # as of memory; it looks again
                if not told:
                    thread = threading.current_thread()
                    threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))
                told = True
            del look
