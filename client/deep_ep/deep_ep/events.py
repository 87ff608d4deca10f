"""Events of streams. On host devices everything has happened when a call returns, so events are trivial."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from epd.torch._dynamo import breaks_graphs


@functools.lru_cache(maxsize=None)
def _on_gpus() -> bool:
    return torch.cuda.is_available()


@breaks_graphs
class EventHandle:
    """An event of a stream, recorded when this is made. stream None: torch's current one."""

    __slots__ = ("__weakref__", "event")

    def __init__(self, stream: Any = None) -> None:
        self.event: Optional[torch.cuda.Event] = None
        if _on_gpus():
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream() if stream is None else stream)

    def current_stream_wait(self) -> None:
        """The current stream's later work begins after the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@breaks_graphs
class EventOverlap:
    """An event that a stream may wait for, and what must live until then.

    As a context manager the current stream waits at the block's end:

        event = buffer.dispatch(..., async_finish=True)[-1]
        with event:
            ...                                  # runs beside the dispatch
    """

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[tuple[Any, ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """The current stream's later work begins after the event. RuntimeError: there is none."""
        if self.event is None:
            raise RuntimeError("the call has no event; allowed: calls with async_finish=True")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
