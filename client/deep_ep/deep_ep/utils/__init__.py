"""Events, and helpers for tests and benchmarks: `envs`, `math`, `testing`."""

from ..events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
