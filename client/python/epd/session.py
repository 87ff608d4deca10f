"""One attachment to one device of a daemon."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Optional, Union

from . import _abi
from ._arrays import array_address, array_bytes, held
from ._blocking import on_a_thread
from ._handles import NotCopied, SessionHandle, own_group, own_session
from ._library import library
from .errors import Error, InvalidArgument, check, last_error
from .group import Group
from .types import DeviceKind, GroupConfig, SessionInfo, WaitBy, encoded, integer, set_number


def attach(
    socket_path: Union[str, os.PathLike[str], None] = None,
    device: Optional[str] = None,
    *,
    timeout_ms: int = 0,
    wait_by: WaitBy = WaitBy.MEMOP,
) -> Session:
    """Attaches to a daemon.

    socket_path  Several paths with colons between them: if no daemon listens at one, or it has another version,
                 drains or does not answer in its share of the time, the next is tried. None: $EPD_SOCKET, else
                 /run/epd/epd.sock
    device       "host:0", "cuda:1", or a GPU's UUID, "GPU-..."; None: the least used device, among GPUs one that
                 this process sees
    timeout_ms   for the whole handshake; 0: 5000
    wait_by      how streams wait, on CUDA devices; MEMOP: $EPD_WAIT_BY if it is set

    Raises DaemonLost (no daemon listens there), VersionMismatch, PermissionDenied, ResourceExhausted (a quota of
    sessions), NotFound (no such device), DeadlineExceeded, InvalidArgument, Unsupported (a CUDA device and no
    driver), WouldBlock (MPS recovers from a fault: try again).
    """
    options = _abi.AttachOptions(ctypes.sizeof(_abi.AttachOptions))
    if socket_path is not None:
        options.socket_path = encoded("socket_path", socket_path, "None, text, or a path")
    if device is not None:
        options.device = encoded("device", device, "None, or text")
    set_number(options, "timeout_ms", timeout_ms)
    set_number(options, "wait_by", wait_by)
    address = ctypes.c_void_p()
    check(library.epd_session_attach(ctypes.addressof(options), ctypes.addressof(address)))
    return Session(own_session(address.value or 0))


class Session(NotCopied):
    """One attachment to one device; `attach` makes it. A context manager: detaches at its end.

    A group keeps its session's attachment. Any thread may call anything. In a forked child every call raises
    InvalidArgument; the child may attach anew.
    """

    def __init__(self, handle: SessionHandle) -> None:
        self._handle: Optional[SessionHandle] = handle
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._info = self._load_info()

    @property
    def info(self) -> SessionInfo:
        """The daemon and device of the session; it does not change."""
        return self._info

    def check(self) -> None:
        """Returns while the daemon is there; raises DaemonLost, or the status with which the session ended."""
        status = library.epd_session_check(self._handle)
        if status:
            raise self._error(status)

    def join(self, config: GroupConfig) -> Group:
        """Joins a group. Waits until all of its ranks have joined, at most config.timeout_ms, and 5 seconds more
        where the daemon does not answer.

        Raises InvalidArgument (names the field; for a mismatch with the ranks already there both values),
        DeadlineExceeded (names the missing ranks), ResourceExhausted, Unsupported, DaemonLost.

        Ctrl-C ends the call in the main thread. The daemon holds the rank until the join's time is over, or all
        have joined, and then takes it as left. So long it holds the session too.
        """
        if not isinstance(config, GroupConfig):
            raise TypeError(f"config is {config!r}; allowed: a GroupConfig")
        session = self._handle
        raw = config._raw()

        def join() -> Union[Group, Error]:
            address = ctypes.c_void_p()
            status = library.epd_group_join(session, ctypes.addressof(raw), ctypes.addressof(address))
            if status or session is None:
                return self._error(status)
            return Group(self._info, own_group(address.value or 0, session), config)

        made = on_a_thread(join, "epd-join")
        if isinstance(made, Error):
            session = None  # the traceback keeps this frame, and would keep the attachment
            try:
                raise made
            finally:
                del made  # a cycle would keep the caller's frame, too
        self._groups.add(made)
        return made

    def register(self, memory: Any, bytes: Optional[int] = None) -> None:
        """Registers memory of a GPU: operations use rows there in place from now on, not only from the third that
        names them.

        memory  a contiguous tensor, another array on the GPU, or an address
        bytes   None: those of the array

        Raises Unsupported (the device's operations take rows from their slots alone, and copy other memory),
        InvalidArgument, ResourceExhausted (64 are registered). epd_memory_register in epd.h says what is copied.
        Nothing keeps the memory. When it is freed, its registration ends.
        """
        memory = held("memory", memory)
        address = array_address("memory", memory, True)
        length = array_bytes(memory) if bytes is None else integer("bytes", bytes)
        if not 0 <= length < 1 << 64:
            raise InvalidArgument(f"bytes is {length}; allowed: 0 .. {(1 << 64) - 1}")
        status = library.epd_memory_register(self._handle, address, length)
        if status:
            raise self._error(status)

    def unregister(self, memory: Any) -> None:
        """Rows there are copied from now on, but by graphs that name the memory.

        Raises NotFound: nothing that is registered begins there.
        """
        address = array_address("memory", held("memory", memory), True)
        status = library.epd_memory_unregister(self._handle, address)
        if status:
            raise self._error(status)

    def detach(self) -> bool:
        """Leaves all groups and ends the attachment. True: it has ended.

        False: arrays of a group are alive; it ends when the last one has died. Every other call on the session
        raises InvalidArgument from here on.
        """
        left = [group.leave() for group in list(self._groups)]
        self._handle = None
        return all(left)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"Session({self._info.device!r}, {self._info.daemon!r})"

    def _load_info(self) -> SessionInfo:
        raw = _abi.SessionInfo(ctypes.sizeof(_abi.SessionInfo))
        check(library.epd_session_info(self._handle, ctypes.addressof(raw)))
        return SessionInfo(
            raw.session_id,
            raw.device.decode(),
            raw.daemon.decode(),
            raw.boot_id.decode(),
            DeviceKind(raw.device_kind),
        )

    def _error(self, status: int) -> Error:
        if self._handle is None:
            return InvalidArgument("the session has been detached; allowed: sessions that are attached")
        return last_error(status)


def version() -> str:
    """The version of libepd: "0.1.0"."""
    text: Union[bytes, None] = library.epd_version()
    return (text or b"").decode()
