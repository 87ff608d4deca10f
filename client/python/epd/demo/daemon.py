"""A daemon of one's own, for as long as a `with` block."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Optional

from .. import DaemonLost, EngineRestarted, attach


def daemon_program(given: Optional[str]) -> Optional[str]:
    """The program `epd`: as given, else $EPD_DAEMON, else in PATH."""
    return given or os.environ.get("EPD_DAEMON") or shutil.which("epd")


class OwnDaemon:
    """Starts `epd serve` with host devices in a directory of its own; stops it and removes the directory."""

    def __init__(self, program: str, host_devices: int) -> None:
        self._directory = tempfile.mkdtemp(prefix="epd-demo-")
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
        try:
            with open(self.log, "w") as log:
                self._process = subprocess.Popen(
                    [program, "serve", "--config", config, *sockets], stdout=log, stderr=log
                )
        except OSError:
            shutil.rmtree(self._directory)
            raise

    def __enter__(self) -> OwnDaemon:
        """Returns when the first device can be attached to. Raises RuntimeError with the end of the log."""
        end = time.monotonic() + 20
        while True:
            try:
                attach(self.socket, "host:0").detach()
                return self
            except (DaemonLost, EngineRestarted):
                if self._process.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                    continue
            with open(self.log) as log:
                text = log.read()[-2000:]
            self.__exit__(None, None, None)
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
        shutil.rmtree(self._directory, ignore_errors=True)
