"""Owners of a session and of a membership of the library.

Both are integers: the C handles, as calls take them. They refer to nothing (which session a membership needs is
kept beside them), and the cycle collector does not track them. So such an object ends only when the last reference
goes, after every finalizer of a cycle that it hangs on has run: an array of a group can be used in any finalizer, in
whatever order things are collected.

Their __del__ runs no code of Python, where a Ctrl-C (KeyboardInterrupt) could come: before the call into the library,
which would then not be made, or after it, where Python prints "Exception ignored". It is raised in the program's code.
"""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from typing import Any

from ._library import library

_gc_untrack: Any = ctypes.pythonapi.PyObject_GC_UnTrack
_gc_untrack.argtypes = (ctypes.py_object,)
_gc_untrack.restype = None

# The memberships that have not been left, and what leaves each. That also keeps the attachment that it needs.
_members: dict[int, partial[Any]] = {}


class NotCopied:
    """An object of this process that ends with its last reference: a copy would end it too."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(f"{type(self).__name__} can't be copied or pickled: other processes attach and join on their own")


class SessionHandle(NotCopied, int):
    """Detaches with its last reference. Waits for the daemon, at most 200 ms."""

    __slots__ = ()

    __del__: Any = property(partial(partial, library.epd_session_detach))  # in a forked child it does nothing


class GroupHandle(NotCopied, int):
    """Leaves with its last reference. Waits for the daemon, at most 5 seconds."""

    __slots__ = ()

    # Taken out before it leaves: another membership may get the address then.
    __del__: Any = property(_members.pop)


def _untrack(handle: object) -> None:
    if gc.is_tracked(
        handle
    ):  # older Pythons do not track such objects, and the C call must not be made for them
        _gc_untrack(handle)


def own_session(address: int) -> SessionHandle:
    """The owner of a session that was just made."""
    handle = SessionHandle(address)
    _untrack(handle)
    return handle


def own_group(address: int, session: SessionHandle) -> GroupHandle:
    """The owner of a membership that was just made. It keeps the session's attachment."""
    leave: Any = partial(library.epd_group_leave, address)
    leave.session = session  # perhaps the last reference: it detaches after the call
    _members[address] = leave
    handle = GroupHandle(address)
    _untrack(handle)
    return handle


def is_member(address: int) -> bool:
    """False once the membership has been left."""
    return address in _members
