"""The examples, run as their users run them, and what documents show of them."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from array import array
from typing import Any, Callable

import pytest
from conftest import ROOT, Daemon

import epd

EXAMPLES = ROOT / "client/python/examples"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("ranks", ["1", "2", "4"])
def test_moe_layer_is_the_dense_layer(daemon: Daemon, ranks: str) -> None:
    done = run(sys.executable, str(EXAMPLES / "moe_layer.py"), "--ranks", ranks, daemon.socket)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as the dense layer") == int(ranks)


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_moe_training_is_the_dense_layer(daemon: Daemon, ranks: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")
    done = run(sys.executable, str(EXAMPLES / "moe_training.py"), "--ranks", ranks, daemon.socket)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as the dense layer") == int(ranks)


def test_the_readme_shows_the_minimal_example() -> None:
    program = (EXAMPLES / "minimal.py").read_text().split('"""\n\n', 1)[1]
    assert program in (ROOT / "README.md").read_text()


def test_the_recovery_loop_of_the_guide_goes_on_after_an_engine_was_killed(
    own_daemon: Callable[..., Daemon],
) -> None:
    source = (EXAMPLES / "recovery.py").read_text()
    loop = source[source.index("def run(") : source.index("\n\n\ndef main")]
    assert loop in (ROOT / "client/GUIDE.md").read_text()
    daemon = own_daemon('devices.host = 1\ndevices.cuda = "none"')
    found = re.search(r'event="engine started" device="host:0" pid=(\d+)', daemon.log.read_text())
    assert found is not None
    engine = int(found[1])
    submitted: list[int] = []
    handles: dict[int, Any] = {}
    with epd.attach(socket_path=daemon.socket) as session:
        group = session.join(
            epd.GroupConfig(name="killed", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1)
        )

        def submit(i: int) -> epd.Ticket:
            submitted.append(i)
            slot = i // 2 % 2
            b = group.buffers(slot)
            if i % 2 == 0:
                b.x[:] = array("H", [0x3F80 + i] * len(b.x))
                b.topk_idx[:] = array("i", [t % 4 for t in range(8)])
                dispatch = group.dispatch(slot, 8)
                handles[i] = dispatch.handle
                return dispatch
            b.y[: 8 * 128] = b.recv_x[: 8 * 128]
            if submitted.count(5) == 1 and i == 5:
                os.kill(engine, signal.SIGKILL)
            return group.combine(slot, handles[i - 1])

        runpy.run_path(str(EXAMPLES / "recovery.py"))["run"](group, submit, 10)
        assert submitted.count(5) > 1 and submitted[-1] == 9
        assert set(group.buffers(0).out) == {0x3F80 + 8}


@pytest.mark.parametrize("example", ["moe_layer", "moe_graph"])
@pytest.mark.parametrize("ranks", ["0", "-1", "two", "1025"])
def test_examples_have_a_rank_at_least(example: str, ranks: str) -> None:
    done = run(sys.executable, str(EXAMPLES / f"{example}.py"), "--ranks", ranks)
    assert done.returncode == 2 and f"ranks is {ranks}; allowed: 1 .. 1024" in done.stderr, done.stderr


def test_examples_say_in_a_line_what_is_missing(daemon: Daemon) -> None:
    done = run(sys.executable, str(EXAMPLES / "moe_layer.py"), "--ranks", "2", "/nonexistent/epd.sock")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("DAEMON_LOST") == done.stderr.count("\n") == 2
    done = run(sys.executable, str(EXAMPLES / "moe_graph.py"), "--ranks", "1", daemon.socket, LD_LIBRARY_PATH="")
    if done.returncode != 0:  # there is no CUDA driver here, or no GPU
        assert done.returncode == 1 and re.fullmatch(r"rank 0: .*\n", done.stderr), done.stderr


def test_call_costs_are_told(daemon: Daemon) -> None:
    done = run(sys.executable, str(ROOT / "tests/python/call_cost.py"), daemon.socket, "--calls", "50")
    assert done.returncode == 0, done.stderr
    for name in ("noop", "dispatch", "combine", "wait"):
        assert re.search(rf"^{name} .* us", done.stdout, re.MULTILINE), done.stdout
