"""Finds and loads libepd."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from typing import Any

from . import _abi


def find_library() -> str:
    """$EPD_LIBRARY, else the library inside the wheel, else what the loader finds."""
    given = os.environ.get("EPD_LIBRARY")
    if given:
        return given
    bundled = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libepd.so.1")
    if os.path.exists(bundled):
        return bundled
    return ctypes.util.find_library("epd") or "libepd.so.1"


def load_library(path: str) -> Any:
    """The library with its functions declared. Calls release the GIL. Raises ImportError."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"libepd is not found: {error}; name it by EPD_LIBRARY") from error
    for name, (result, arguments) in _abi.FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise ImportError(f"{path} has no function {name}: another version of epd") from None
        function.restype = result
        function.argtypes = arguments
    return library


path = find_library()
library = load_library(path)
