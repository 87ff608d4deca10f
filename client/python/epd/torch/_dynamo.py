"""The view that torch.compile has of these packages: calls that break its graph, as those of a C extension do. It sees
nothing inside. epd.torch.ops is for graphs.

torch.compiler.disable does that too, but takes 2 us of each call that is not compiled, and loads Dynamo.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Callable, TypeVar

_Class = TypeVar("_Class", bound=type)
_Call = TypeVar("_Call", bound=Callable[..., Any])

_EPD = (
    "epd._arrays",
    "epd._blocking",
    "epd._handles",
    "epd._hooks",
    "epd._membership",
    "epd._shapes",
    "epd._submissions",
    "epd.buffers",
    "epd.group",
    "epd.memory",
    "epd.session",
    "epd.ticket",
    "epd.torch.checks",
    "epd.torch.regions",
    "epd.torch.staging",
)
_hidden: set[str] = set()


def breaks_graph(call: _Call) -> _Call:
    """Dynamo does not trace into the function, but makes the call when the graph before it has run."""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable leaves it
    return call


def breaks_graphs(cls: _Class) -> _Class:
    """The same for all methods of a class."""
    for method in vars(cls).values():
        function = getattr(method, "__func__", method)  # of static methods
        if inspect.isfunction(function):
            breaks_graph(function)
    return cls


@breaks_graph
def hide(package: str = "epd") -> None:
    """Once Dynamo is loaded, it leaves the frames of the package alone, and those of epd. Called where a call begins:
    nobody tells when Dynamo is loaded."""
    if package not in _hidden and "torch._dynamo" in sys.modules:
        disable = getattr(sys.modules["torch._dynamo"], "disable", None)
        if disable is not None:  # else another thread is loading it
            disable(_hide)(package)


def _hide(package: str) -> None:
    _hidden.update((package, "epd"))
    try:
        from torch._dynamo.trace_rules import add
    except ImportError:  # before 2.2: the frames are traced, too
        return
    for name in _EPD if package == "epd" else (package, *_EPD):
        add(name)
