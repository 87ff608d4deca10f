"""The examples and the demo, run as their users run them, and what documents show of them."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from typing import Any, Callable

import pytest
from conftest import BUILD, ROOT, Daemon

import epd

EXAMPLES = ROOT / "client/python/examples"
SMALL = "--ranks 2 --layers 2 --steps 1 --tokens 9 --hidden 272 --experts 32 --topk 4 --seed 5".split()


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
    loop = source[source.index("BREAKS =") : source.index("\n\n\ndef main")]
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


def checksum(text: str) -> str:
    found = re.search(r"Checksum of the hidden states: ([0-9a-f]{16})", text)
    assert found is not None, text
    return found[1]


def test_the_demo_gives_the_checksum_of_epd_moe_demo(daemon: Daemon) -> None:
    program = BUILD / "bin/epd-moe-demo"
    if not program.exists():
        pytest.skip("epd-moe-demo is not built")
    ours = run(sys.executable, "-m", "epd.demo", "--socket", daemon.socket, *SMALL)
    theirs = run(str(program), "--socket", daemon.socket, *SMALL)
    assert ours.returncode == 0 and theirs.returncode == 0, ours.stderr + theirs.stderr
    assert checksum(ours.stdout) == checksum(theirs.stdout)


def test_the_demo_shows_its_progress(daemon: Daemon) -> None:
    done = run(sys.executable, "-m", "epd.demo", "--socket", daemon.socket, *SMALL)
    assert done.stderr.startswith("forward pass 1 of 2, layer 1 of 2\n"), done.stderr
    assert errors(done.stderr) == ""


def errors(stderr: str) -> str:
    """All lines but those of the demo's progress."""
    return re.sub(r"forward pass \d+ of \d+, layer \d+ of \d+\n", "", stderr)


def test_the_demo_starts_a_daemon_of_its_own(daemon: Daemon) -> None:
    ours = run(sys.executable, "-m", "epd.demo", "--epd", str(BUILD / "bin/epd"), *SMALL)
    assert ours.returncode == 0, ours.stderr
    again = run(sys.executable, "-m", "epd.demo", "--socket", daemon.socket, *SMALL)
    assert checksum(ours.stdout) == checksum(again.stdout)


def test_the_demo_has_its_own_sockets_whatever_the_environment_says(tmp_path: pathlib.Path) -> None:
    sockets = {"EPD_SOCKET": str(tmp_path / "epd.sock"), "EPD_CONTROL_SOCKET": str(tmp_path / "control.sock")}
    ours = run(sys.executable, "-m", "epd.demo", "--epd", str(BUILD / "bin/epd"), *SMALL, **sockets)
    assert ours.returncode == 0, ours.stderr
    assert list(tmp_path.iterdir()) == []


def of_directory(folder: pathlib.Path) -> list[int]:
    """The processes that have it in their command line."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "cmdline").read_text() and process.name != str(os.getpid()):
                found.append(int(process.name))
        except OSError:
            pass  # it has ended
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_demo_leaves_nothing_behind_however_it_ends(number: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # tmp_path is too long for a socket
        folder = pathlib.Path(name)
        text = folder / "text"  # so that the ranks too have the directory in their command lines
        text.write_text("a few words")
        long = ["--epd", str(BUILD / "bin/epd"), "--text", str(text), *SMALL, "--steps", "10000"]
        demo = subprocess.Popen(
            [sys.executable, "-m", "epd.demo", *long],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": name},
        )
        end = time.monotonic() + 40
        try:
            while len(of_directory(folder)) < 4:  # the daemon too, and a rank
                assert demo.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            demo.send_signal(number)
            _, error = demo.communicate(timeout=20)
            assert demo.returncode == -number and errors(error) == ""
            end = time.monotonic() + 40
            while of_directory(folder) or list(folder.iterdir()) != [text]:
                assert time.monotonic() < end, (of_directory(folder), list(folder.iterdir()))
                time.sleep(0.05)
        finally:
            demo.kill()
            demo.wait()


@pytest.mark.parametrize("name", ["with a blank", 'with"quote', "l" * 100])
def test_the_demo_takes_any_temporary_directory(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).mkdir()
    ours = run(sys.executable, "-m", "epd.demo", "--epd", str(BUILD / "bin/epd"), *SMALL, TMPDIR=str(tmp_path / name))
    assert ours.returncode == 0 and errors(ours.stderr) == "", ours.stderr
    assert list((tmp_path / name).iterdir()) == []


def test_the_demo_says_what_is_wrong() -> None:
    done = run(sys.executable, "-m", "epd.demo", "--hidden", "100")
    assert done.returncode == 2 and "hidden is 100; allowed: 16..16384" in done.stderr
    done = run(sys.executable, "-m", "epd.demo", "--epd", "/nonexistent/epd", *SMALL)
    assert done.returncode == 1 and "/nonexistent/epd" in done.stderr, done.stderr
    with tempfile.TemporaryDirectory(prefix="epd-demo-test-") as folder:
        for program in ("/nonexistent/epd", "/bin/false"):
            done = run(sys.executable, "-m", "epd.demo", "--epd", program, *SMALL, TMPDIR=folder)
            assert done.returncode == 1 and done.stderr.startswith(f"starting {program}: "), done.stderr
            assert os.listdir(folder) == []
    for text in ("/nonexistent/text", "/"):
        done = run(sys.executable, "-m", "epd.demo", "--text", text, *SMALL)
        assert done.returncode == 1 and done.stderr.startswith(f"text is '{text}'; allowed: a file"), done.stderr
        assert done.stderr.count("\n") == 1


def test_the_demo_ends_with_the_first_rank_that_fails(daemon: Daemon) -> None:
    """The daemon has 4 devices: ranks 4 and 5 find none, while the others wait for them."""
    begin = time.monotonic()
    more = ["6" if option == "2" and before == "--ranks" else option for before, option in zip([""] + SMALL, SMALL)]
    more[more.index("32")] = "48"
    done = run(sys.executable, "-m", "epd.demo", "--socket", daemon.socket, *more)
    assert done.returncode == 1 and re.fullmatch(r"rank [45]: NotFound: .*host:[45].*\n", done.stderr), done.stderr
    assert time.monotonic() - begin < 50


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
