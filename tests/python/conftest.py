"""A daemon on host devices for all tests of a file, and what several files use."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Iterator, Optional

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("EPD_BUILD_DIR", ROOT / "build/dev"))
os.environ.setdefault("EPD_LIBRARY", str(BUILD / "lib/libepd.so"))
os.environ["PYTHONPATH"] = str(ROOT / "client/python")  # of child processes
sys.path.insert(0, str(ROOT / "client/python"))

import epd  # noqa: E402


class Daemon:
    """`epd serve` in a directory of its own."""

    def __init__(self, lines: str, environment: Optional[dict[str, str]] = None) -> None:
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="epd-pytest-"))
        self.socket = str(self.directory / "epd.sock")
        self.control = str(self.directory / "control.sock")
        config = self.directory / "epd.toml"
        config.write_text(
            f'daemon.socket = "{self.socket}"\ndaemon.control_socket = "{self.control}"\n{lines}\n'
        )
        self.log = self.directory / "epd.log"
        with self.log.open("w") as log:
            command = [str(BUILD / "bin/epd"), "serve", "--config", str(config)]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
            )
        self.wait_for(lambda: self.epctl("status").returncode == 0)

    def epctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(BUILD / "bin/epctl"), "--socket", self.control, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.02)

    def stop(self) -> int:
        # Objects that tests have left in cycles, as tracebacks of exceptions, would keep sessions, and the daemon would
        # wait for those.
        gc.collect()
        self.process.terminate()
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            shutil.rmtree(self.directory, ignore_errors=True)


HOST_DEVICES = 'devices.host = 4\ndevices.cuda = "none"'


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    running = Daemon(HOST_DEVICES)
    yield running
    assert running.stop() == 0


@pytest.fixture
def own_daemon() -> Iterator[Callable[..., Daemon]]:
    """Makes daemons that the test may hurt; they are killed at its end."""
    started: list[Daemon] = []

    def start(lines: str = HOST_DEVICES, environment: Optional[dict[str, str]] = None) -> Daemon:
        started.append(Daemon(lines, environment))
        return started[-1]

    yield start
    for each in started:
        each.stop()


_names = itertools.count()


def shape(**fields: Any) -> epd.GroupConfig:
    """A small group's shape under a name of its own."""
    values: dict[str, Any] = {
        "name": f"test-{os.getpid()}-{next(_names)}",
        "num_ranks": 1,
        "num_experts": 4,
        "max_tokens": 8,
        "hidden": 128,
        "topk": 2,
        "timeout_ms": 20000,
    }
    return epd.GroupConfig(**{**values, **fields})


def with_rank(config: epd.GroupConfig, rank: int, **fields: Any) -> epd.GroupConfig:
    import dataclasses

    return dataclasses.replace(config, rank=rank, **fields)


class Ranks:
    """All ranks of a group in this process, rank r on device host:r."""

    def __init__(self, socket: str, config: epd.GroupConfig, device: str = "host") -> None:
        self.sessions = [epd.attach(socket, f"{device}:{rank}") for rank in range(config.num_ranks)]
        self.groups: list[epd.Group] = []
        joined: list[Any] = [None] * config.num_ranks

        def join(rank: int) -> None:
            try:
                joined[rank] = self.sessions[rank].join(with_rank(config, rank))
            except epd.Error as error:
                joined[rank] = error

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(config.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in joined:
            if isinstance(result, Exception):
                raise result
            self.groups.append(result)

    def __enter__(self) -> list[epd.Group]:
        return self.groups

    def __exit__(self, *_: object) -> None:
        for session in self.sessions:
            session.detach()


def run_python(
    code: str, *arguments: str, seconds: float = 30, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program of its own, in this interpreter."""
    command = [sys.executable, "-X", "dev", "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}
    )
