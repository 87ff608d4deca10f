"""Ctrl-C during calls that block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from conftest import Daemon, Ranks, shape

import epd
import epd.group
import epd.ticket

PREAMBLE = """
import os, sys, threading, time, epd
def report(call):
    begin = time.monotonic()
    try:
        print("begins", flush=True)
        print("returned", call())
    except KeyboardInterrupt: print("interrupted", time.monotonic() - begin < 10, flush=True)
config = epd.GroupConfig(name=f"int-{os.getpid()}", num_ranks=2, num_experts=4, max_tokens=8, hidden=128, topk=1,
                         policy=epd.Policy.DEGRADE, timeout_ms=60000)
import dataclasses
joined = {}
def join(rank):
    session = epd.attach(sys.argv[1], f"host:{rank}")
    joined[rank] = session.join(dataclasses.replace(config, rank=rank)), session
def both():
    threads = [threading.Thread(target=join, args=(r,)) for r in range(2)]
    [t.start() for t in threads]; [t.join() for t in threads]
    return joined[0][0], joined[1][0]
"""

BLOCKING = {
    "join": "report(lambda: join(0)); os._exit(0)",
    "wait": "a, b = both(); t = a.dispatch(0, 0); report(t.wait); print(t.pending)",
    "wait with a time": "a, b = both(); t = a.dispatch(0, 0); report(lambda: t.wait(20000)); print(t.pending)",
    "advance": "a, b = both(); t = a.dispatch(0, 0); report(lambda: a.advance(t)); print(t.pending)",
    "counts": "a, b = both(); t = a.dispatch(0, 0); report(t.counts); print(t.pending)",
    "wait_sent": """
a, b = both(); first = a.dispatch(0, 0); b.dispatch(0, 0).wait(); h = first.handle; first.wait()
t = a.combine(0, h, defer_receive=True); report(t.wait_sent); print(t.pending)""",
    "resume": """
import signal
a, b = both()
engine = int(sys.argv[2])
os.kill(engine, signal.SIGSTOP)
try:
    try: a.dispatch(0, 0, timeout_ms=200).wait()
    except epd.DeadlineExceeded: pass
    report(a.resume)
finally: os.kill(engine, signal.SIGCONT)
print(a.resume().epoch == 2)""",
    "advance to the next epoch": """
import signal
a, b = both()
engine = int(sys.argv[2])
os.kill(engine, signal.SIGSTOP)
t = a.dispatch(0, 0, timeout_ms=200)
try: report(lambda: a.advance(t))
finally: os.kill(engine, signal.SIGCONT)
print(a.advance(t)[1].epoch == 2)""",
}


def engine_of(daemon: Daemon, device: str) -> int:
    devices = json.loads(daemon.epctl("--json", "devices").stdout)["devices"]
    engine: int = next(each["engine_pid"] for each in devices if each["name"] == device)
    assert engine > 0  # 0 and -1 name many processes to kill(2)
    return engine


def interrupted(daemon: Daemon, code: str) -> str:
    program = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, daemon.socket, str(engine_of(daemon, "host:1"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None and program.stdout.readline() == "begins\n"
        daemon.wait_for(lambda: f"int-{program.pid}" in daemon.epctl("groups").stdout)  # the join has come
        time.sleep(0.5)
        program.send_signal(signal.SIGINT)
        out, error = program.communicate(timeout=25)
        assert program.returncode == 0, out + error
        return out
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize("name", BLOCKING)
def test_ctrl_c_ends_a_call_that_blocks(daemon: Daemon, name: str) -> None:
    out = interrupted(daemon, BLOCKING[name])
    assert out == "interrupted True\n" + ("" if name == "join" else "True\n")


def test_after_ctrl_c_the_wait_can_be_repeated(daemon: Daemon) -> None:
    code = """
a, b = both()
t = a.dispatch(0, 0)
report(t.wait)
b.dispatch(0, 0).wait()
print(t.wait().status.name)
"""
    assert interrupted(daemon, code) == "interrupted True\nOK\n"


def test_a_join_that_ctrl_c_has_ended_leaves_again(daemon: Daemon) -> None:
    """The second rank comes later: the first one's join ends then, and it leaves."""
    code = """
session = epd.attach(sys.argv[1], "host:0")
report(lambda: session.join(dataclasses.replace(config, rank=0)))
join(1)
group = joined[1][0]
end = time.monotonic() + 10
while group.active(0) and time.monotonic() < end: time.sleep(0.02)
print(group.active(0), group.active(1))
"""
    assert interrupted(daemon, code) == "interrupted True\nFalse True\n"


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_wait_takes_the_time_that_was_given(daemon: Daemon, thread: str) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        ticket = groups[0].dispatch(0, 0)
        times = []

        def wait() -> None:
            for call in (ticket.wait, ticket.counts):
                begin = time.monotonic()
                with pytest.raises(epd.DeadlineExceeded, match="within 700 ms"):
                    call(700)
                times.append(time.monotonic() - begin)

        if thread == "main":
            wait()
        else:
            other = threading.Thread(target=wait)
            other.start()
            other.join()
        assert len(times) == 2 and all(0.69 < taken < 20 for taken in times)
        groups[1].dispatch(0, 0).wait()
        assert ticket.wait().status == epd.Status.OK


def test_a_wait_that_is_longer_than_a_slice_gets_the_result_and_the_operations_own_failure(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        ticket = groups[0].dispatch(0, 0)
        later = threading.Timer(0.6, lambda: groups[1].dispatch(0, 0))
        later.start()
        assert ticket.wait().status == epd.Status.OK
        later.join()
        late = groups[0].dispatch(1, 0, timeout_ms=600)
        with pytest.raises(epd.DeadlineExceeded) as caught:
            late.wait()
        assert caught.value.rank == 1 and not late.pending
        with pytest.raises(epd.NotFound):
            late.wait()


def test_a_wait_without_end_ends_though_the_engine_is_stopped(daemon: Daemon) -> None:
    """5 seconds after the operation's deadline, as epd.h says."""
    with epd.attach(daemon.socket, "host:3") as session, session.join(shape()) as group:
        engine = engine_of(daemon, "host:3")
        os.kill(engine, signal.SIGSTOP)
        try:
            ticket = group.dispatch(0, 0, timeout_ms=500)
            begin = time.monotonic()
            with pytest.raises(epd.DeadlineExceeded, match="is it stopped"):
                ticket.wait()
            assert 5 < time.monotonic() - begin < 20 and ticket.pending
        finally:
            os.kill(engine, signal.SIGCONT)


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_that_comes_with_ctrl_c_is_told_by_the_next_wait(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The library has retired the ticket when Python takes the signal."""
    real = epd.ticket._ticket_wait

    def interrupted_wait(*arguments: Any) -> int:
        status: int = real(*arguments)
        if ticket.pending:
            return status
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Ranks(daemon.socket, shape(num_ranks=2)) as (a, b):
        ticket = a.dispatch(0, 3, timeout_ms=300 if fails else 0)
        if not fails:
            b.dispatch(0, 2).wait()
        monkeypatch.setattr(epd.ticket, "_ticket_wait", interrupted_wait)
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        assert not ticket.pending
        if fails:
            with pytest.raises(epd.DeadlineExceeded, match="rank 1"):
                ticket.wait()
        else:
            result = ticket.wait()
            assert result.num_recv_rows == 5
        with pytest.raises(epd.NotFound, match="the ticket is empty"):
            ticket.wait()


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_that_comes_with_ctrl_c_is_told_by_the_next_advance(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    real = epd.group.library.epd_group_advance

    def interrupted_advance(*arguments: Any) -> int:
        status: int = real(*arguments)
        if ticket.pending:
            return status
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Ranks(daemon.socket, shape(num_ranks=2)) as (a, b):
        ticket = a.dispatch(0, 3, timeout_ms=300 if fails else 0)
        if not fails:
            b.dispatch(0, 2).wait()
        monkeypatch.setattr(epd.group.library, "epd_group_advance", interrupted_advance)
        with pytest.raises(KeyboardInterrupt):
            a.advance(ticket)
        assert not ticket.pending
        result, at = a.advance(ticket)
        if fails:
            assert result is None and at.epoch == 2 and at.resume_op == 0
        else:
            assert result is not None and result.num_recv_rows == 5 and at.resume_op == 1
        assert a.advance(ticket) == (None, at)


def test_ctrl_c_while_a_last_reference_leaves(daemon: Daemon) -> None:
    """It came out of GroupHandle.__del__, where Python only prints it, and sometimes before the membership was left."""
    code = """
import signal
import epd._handles
signal.signal(signal.SIGALRM, signal.default_int_handler)
session = epd.attach(sys.argv[1], "host:0")
taken = 0
for i in range(100):
    group = session.join(dataclasses.replace(config, num_ranks=1))
    handle, group._handle = group._handle, None
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00002 * (i + 1))
        del handle
        while True: pass
    except KeyboardInterrupt:
        taken += 1
        handle = None  # the signal can come before the line that deletes it
print(taken, epd._handles._members)
"""
    program = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, daemon.socket], capture_output=True, text=True, timeout=60
    )
    assert program.stdout == "100 {}\n", program.stderr
    assert "Handle" not in program.stderr
