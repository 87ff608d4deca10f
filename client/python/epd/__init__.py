"""epd: expert-parallel dispatch and combine through a daemon.

    import epd

    with epd.attach() as session, session.join(epd.GroupConfig(name="layer", num_ranks=2, ...)) as group:
        buffers = group.buffers(0)             # shared with the engine: nothing is copied
        ...                                    # write buffers.x, topk_idx, topk_weights
        dispatch = group.dispatch(0, num_tokens)
        rows = dispatch.wait().num_recv_rows   # now buffers.recv_x holds the rows
        ...                                    # write buffers.y
        group.combine(0, dispatch.handle).wait()  # now buffers.out holds the sums

See README.md beside this package, and epd.h for the contract of every call.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from ._library import path as library_path
from .buffers import Buffers, DeviceArray
from .errors import (
    BREAKS,
    Aborted,
    DaemonLost,
    DeadlineExceeded,
    EngineRestarted,
    Error,
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RankLost,
    ResourceExhausted,
    Status,
    Unsupported,
    VersionMismatch,
    WouldBlock,
)
from .group import Group
from .memory import Memory
from .session import Session, attach, version
from .ticket import Dispatch, Handle, Ticket
from .types import (
    ANY_RANK,
    FOREVER,
    NO_WAIT,
    Counts,
    DeviceKind,
    GroupBytes,
    GroupConfig,
    IndexType,
    Layout,
    Payload,
    Policy,
    Span,
    Progress,
    RangeFormat,
    Region,
    Result,
    ResumeInfo,
    ReturnWeights,
    RowFormat,
    ScaleFormat,
    ScaleLayout,
    SessionInfo,
    WaitBy,
    Waits,
)

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    if name == "numbers":  # needs numpy, which nothing else here does
        return _import_module(".numbers", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ANY_RANK",
    "BREAKS",
    "FOREVER",
    "NO_WAIT",
    "Aborted",
    "Buffers",
    "Counts",
    "DaemonLost",
    "DeadlineExceeded",
    "DeviceArray",
    "DeviceKind",
    "Dispatch",
    "EngineRestarted",
    "Error",
    "Group",
    "GroupBytes",
    "GroupConfig",
    "Handle",
    "IndexType",
    "InternalError",
    "InvalidArgument",
    "Layout",
    "Memory",
    "NotFound",
    "Payload",
    "PermissionDenied",
    "Policy",
    "Span",
    "Progress",
    "RankLost",
    "RangeFormat",
    "Region",
    "ResourceExhausted",
    "Result",
    "ResumeInfo",
    "ReturnWeights",
    "RowFormat",
    "ScaleFormat",
    "ScaleLayout",
    "Session",
    "SessionInfo",
    "Status",
    "Ticket",
    "Unsupported",
    "VersionMismatch",
    "WaitBy",
    "Waits",
    "WouldBlock",
    "attach",
    "library_path",
    "version",
]
