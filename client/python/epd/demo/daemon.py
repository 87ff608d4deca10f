"""A daemon of one's own, for as long as a `with` block, and no longer than this process."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Optional

from .. import DaemonLost, EngineRestarted, attach

_prctl = ctypes.CDLL(None).prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
_PR_SET_PDEATHSIG = 1

# Of a directory whose sockets have paths that a socket can have, and the daemon takes.
_USABLE = re.compile(r"[A-Za-z0-9/._+=@~,-]{1,70}")


def daemon_program(given: Optional[str]) -> Optional[str]:
    """The program `epd`: as given, else $EPD_DAEMON, else in PATH."""
    return given or os.environ.get("EPD_DAEMON") or shutil.which("epd")


def end_with(parent: int, number: signal.Signals) -> None:
    """For a child process of the parent: it gets the signal when the parent ends, however it does."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _make_directory() -> str:
    """Below $TMPDIR, else /tmp if sockets can't be below that. Raises OSError."""
    usable = _USABLE.fullmatch(os.path.abspath(tempfile.gettempdir()))
    return tempfile.mkdtemp(prefix="epd-demo-", dir=None if usable else "/tmp")


class OwnDaemon:
    """Starts `epd serve` with host devices in a directory of its own; stops it and removes the directory.

    If this process is killed, the daemon gets SIGTERM, and a process that waits for that removes the directory.
    """

    def __init__(self, program: str, host_devices: int) -> None:
        self._directory = _make_directory()
        remove = ["/bin/sh", "-c", 'read -r _; rm -rf "$0"', self._directory]  # at the end of its input
        self._remover = subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._process = self._start(program, host_devices)
        except BaseException:
            self._remove_directory()
            raise

    def _start(self, program: str, host_devices: int) -> subprocess.Popen[bytes]:
        self.socket = os.path.join(self._directory, "epd.sock")
        self.log = os.path.join(self._directory, "epd.log")
        control = os.path.join(self._directory, "control.sock")
        config = os.path.join(self._directory, "epd.toml")
        with open(config, "w") as file:
            file.write(
                f'[daemon]\nsocket = "{self.socket}"\ncontrol_socket = "{control}"\n'
                f'[devices]\nhost = {host_devices}\ncuda = "none"\n'
            )
        # The sockets as flags too: $EPD_SOCKET and $EPD_CONTROL_SOCKET would win over the file.
        sockets = ["--socket", self.socket, "--control-socket", control]
        parent = os.getpid()
        with open(self.log, "w") as log:
            return subprocess.Popen(
                [program, "serve", "--config", config, *sockets],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: end_with(parent, signal.SIGTERM),
            )

    def __enter__(self) -> OwnDaemon:
        """Returns when the first device can be attached to. Raises epd.Error, or RuntimeError with the end of the
        log."""
        try:
            self._wait_for_a_device()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait_for_a_device(self) -> None:
        end = time.monotonic() + 20
        while True:
            try:
                attach(self.socket, "host:0").detach()
                return
            except (DaemonLost, EngineRestarted):
                if self._process.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                    continue
            with open(self.log) as log:
                text = log.read()[-2000:]
            raise RuntimeError(f"the daemon did not come up; the end of its log:\n{text}")

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._remove_directory()

    def _remove_directory(self) -> None:
        self._remover.communicate()  # ends its input
