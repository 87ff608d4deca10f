"""Objects that keep others alive; garbage collection in any order; fork; the interpreter's end."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any, Callable

import pytest
from conftest import Daemon, run_python, shape

import epd
from epd._handles import is_member

PREAMBLE = """
import gc, os, sys, threading, time
import epd
socket = sys.argv[1]
name = f"life-{os.getpid()}"
config = epd.GroupConfig(name=name, num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1)
"""


def run(daemon: Daemon, code: str, seconds: float = 30) -> str:
    done = run_python(PREAMBLE + code, daemon.socket, seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def num_groups(daemon: Daemon) -> int:
    return len(json.loads(daemon.epctl("--json", "groups").stdout)["groups"])


def sessions_of(daemon: Daemon) -> list[int]:
    return [each["session_id"] for each in json.loads(daemon.epctl("--json", "sessions").stdout)["sessions"]]


def is_listed(daemon: Daemon, group: epd.Group) -> bool:
    groups = json.loads(daemon.epctl("--json", "groups").stdout)["groups"]
    return group.config.name in [each["name"] for each in groups]


def test_leave_makes_memoryviews_invalid(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session:
        group = session.join(shape())
        buffers = group.buffers(0)
        group.dispatch(0, 0).counts()
        assert group.leave() and not is_member(group._address)
        with pytest.raises(ValueError, match="released"):
            buffers.x[0]
        with pytest.raises(epd.InvalidArgument, match="has been left"):
            group.buffers(0)
        assert group.leave()


def test_nobody_releases_the_views_that_all_share(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session:
        group = session.join(shape())
        group.buffers(0).topk_idx[0] = 1

        def counted() -> Any:
            ticket = group.dispatch(0, 1)
            counts = ticket.counts()  # comes before the end
            ticket.wait()
            return counts

        held = counted()
        shared: list[Callable[[], Any]] = [
            group.active_mask,
            lambda: group.buffers(1).x,
            lambda: counted().expert_counts,
        ]
        for view in shared:
            with pytest.raises(BufferError, match="exported"):
                with view() as mine:
                    assert len(mine) > 0
            with pytest.raises(BufferError):
                view().release()
            with view()[:1] as part:
                assert len(part) == 1
            assert len(view().tolist()) > 0
        assert sum(held.expert_counts) == 2
        del view, mine, part
        assert group.leave()
        with pytest.raises(ValueError, match="released"):
            held.expert_counts[0]


def test_arrays_keep_the_membership(daemon: Daemon) -> None:
    numpy = pytest.importorskip("numpy")
    session = epd.attach(daemon.socket)
    group = session.join(shape())
    array = group.numpy(0).x
    part = group.buffers(0).y[5:9]
    array[0, 0] = 7
    assert not group.leave() and not session.detach()
    assert is_member(group._address) and is_listed(daemon, group)
    assert array[0, 0] == 7
    row = numpy.asarray(array)[0]
    del array
    part[0] = 1
    part.release()
    assert row[0] == 7 and is_member(group._address)
    del row
    assert not is_member(group._address) and group.leave()
    daemon.wait_for(lambda: not is_listed(daemon, group))


def test_a_group_keeps_its_session_and_a_ticket_its_group(daemon: Daemon) -> None:
    ticket = epd.attach(daemon.socket).join(shape()).noop(0)
    gc.collect()
    assert is_listed(daemon, ticket._group)
    assert ticket.wait().status == epd.Status.OK
    del ticket
    gc.collect()
    daemon.wait_for(lambda: num_groups(daemon) == 0)


class Thing:
    """An object of a caller's."""


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_is_copied(daemon: Daemon, copied: Callable[[Any], Any]) -> None:
    """A copy of a handle would end what it names. A process that got one by pickle called a foreign address."""
    with epd.attach(daemon.socket) as session, session.join(shape()) as group:
        dispatch = group.dispatch(0, 0)
        memory = epd.Memory(x=bytearray(16))
        dispatch.wait()
        for whole in (session, group, dispatch, group.noop(0), dispatch.handle, memory, session._handle, group._handle):
            with pytest.raises(TypeError, match=f"{type(whole).__name__} can't be copied or pickled"):
                copied(whole)
        gc.collect()
        assert group.noop(0).wait()


def test_what_is_raised_keeps_nothing_alive(daemon: Daemon) -> None:
    """A cycle of an error and its traceback would keep the caller's objects, and so groups and sessions."""

    def caller(call: Callable[[], object]) -> weakref.ref[Thing]:
        thing = Thing()
        try:
            call()
        except epd.Error:
            return weakref.ref(thing)
        raise AssertionError("nothing was raised")

    with epd.attach(daemon.socket) as session, session.join(shape()) as group:
        ticket = group.dispatch(0, 0)
        ticket.wait()
        group.buffers(1).topk_idx[0] = 77  # is no expert
        calls: dict[str, Callable[[], object]] = {
            "an empty ticket": ticket.wait,
            "poll": ticket.poll,
            "counts": lambda: ticket.counts(-5),
            "wait": lambda: group.dispatch(1, 1).wait(),
            "a broken group": lambda: group.dispatch(0, 0),
            "check": group.check,
            "join": lambda: session.join(shape(num_ranks=2, rank=0, timeout_ms=1)),
            "arguments": lambda: group.dispatch(0, 99),
            "attach": lambda: epd.attach("/nowhere"),
        }
        gc.collect()
        gc.disable()
        try:
            kept = [name for name, call in calls.items() if caller(call)() is not None]
        finally:
            gc.enable()
        assert kept == []


def test_handles_are_not_seen_by_the_cycle_collector(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session, session.join(shape()) as group:
        assert not gc.is_tracked(group._handle) and not gc.is_tracked(session._handle)


@pytest.mark.parametrize("order", ["session group array", "array group session", "group session array"])
def test_a_cycle_with_finalizers_is_collected(daemon: Daemon, order: str) -> None:
    """A finalizer of the same cycle still finds the memory."""
    pytest.importorskip("numpy")
    out = run(
        daemon,
        f"""
class Holder:
    def __del__(self):
        self.array[0, 0] += 1
        print("sees", self.array[0, 0])
holder = Holder()
session = epd.attach(socket)
group = session.join(config)
array = group.numpy(0).x
array[0, 0] = 41
for name in "{order}".split():
    setattr(holder, name, globals()[name])
holder.self = holder
other = Holder(); other.array = array; other.other = other
del holder, session, group, array, other, name
print(gc.collect() > 0, epd._handles._members)
""",
    )
    assert out == "sees 42\nsees 43\nTrue {}\n"


def test_nothing_is_closed_at_the_end_of_the_interpreter(daemon: Daemon) -> None:
    run(
        daemon,
        "session = epd.attach(socket); group = session.join(config); x = group.buffers(0).x; t = group.noop(0)",
    )
    daemon.wait_for(lambda: num_groups(daemon) == 0)


def test_the_interpreter_ends_amid_an_operation(daemon: Daemon) -> None:
    """The other rank never comes: a thread waits, a hook waits, and the program ends nevertheless."""
    begin = time.monotonic()
    out = run(
        daemon,
        """
import dataclasses
config = dataclasses.replace(config, num_ranks=2, rank=0)
sessions = [epd.attach(socket, f"host:{rank}") for rank in range(2)]
joined = []
def join(rank): joined.append(sessions[rank].join(dataclasses.replace(config, rank=rank)))
threads = [threading.Thread(target=join, args=(r,)) for r in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
group = min(joined, key=lambda g: g.rank)
group.buffers(0).topk_idx[0] = 0
ticket = group.dispatch(0, 1, timeout_ms=60000)
threading.Thread(target=ticket.wait, daemon=True).start()
other = group.dispatch(1, 1, timeout_ms=60000)
other.on_complete(lambda result: print("hook"))
time.sleep(0.2)
print("ends")
""",
    )
    assert out == "ends\n" and time.monotonic() - begin < 50
    daemon.wait_for(lambda: num_groups(daemon) == 0)


def test_the_error_of_a_join_does_not_keep_the_session(daemon: Daemon) -> None:
    session = epd.attach(daemon.socket)
    with pytest.raises(epd.InvalidArgument) as caught:
        session.join(shape(topk=0))
    number = session.info.session_id
    session.detach()
    del session
    daemon.wait_for(lambda: number not in sessions_of(daemon))
    assert caught.value.field == "topk"


def test_a_killed_process_costs_nobody_else(daemon: Daemon) -> None:
    with epd.attach(daemon.socket, "host:0") as session, session.join(shape()) as group:
        code = (
            PREAMBLE
            + "g = epd.attach(socket).join(config); t = g.noop(0); print('up', flush=True); time.sleep(60)"
        )
        child = subprocess.Popen([sys.executable, "-c", code, daemon.socket], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        daemon.wait_for(lambda: num_groups(daemon) == 1)
        group.noop(0).wait()


def test_fork(daemon: Daemon) -> None:
    """In the child every call is a typed error and collection does nothing; the parent goes on."""
    out = run(
        daemon,
        """
session = epd.attach(socket, "host:0")
group = session.join(config)
b = group.buffers(0)
b.x[0] = 5
b.topk_idx[0] = 1
ticket = group.dispatch(0, 1)
ticket.wait()
pending, dropped = group.noop(1), group.noop(3)
child = os.fork()
if child == 0:
    bad = []
    calls = [
        lambda: group.noop(2), lambda: group.dispatch(2, 1), lambda: group.combine(0, ticket.handle),
        lambda: group.buffers(0), lambda: group.check(), lambda: group.resume(epd.NO_WAIT),
        lambda: pending.wait(), lambda: pending.counts(), lambda: pending.wait_sent(),
        lambda: pending.on_complete(print), pending.poll, lambda: pending.pending, lambda: dropped.drop(),
        lambda: group.active(0), lambda: group.active(7), group.active_mask, group.waits, ticket.drop,
        lambda: ticket.handle.release(), lambda: session.check(), lambda: session.join(config),
    ]
    for i, call in enumerate(calls):
        try:
            call()
            bad.append((i, "nothing raised"))
        except epd.InvalidArgument as error:
            if str(os.getppid()) not in str(error): bad.append((i, str(error)))
        except Exception as error:
            bad.append((i, repr(error)))
    try:
        b.x[0]
        bad.append("the view is valid")
    except ValueError:
        pass
    with epd.attach(socket, "host:1") as own, own.join(epd.GroupConfig(
            name="child", num_ranks=1, num_experts=4, max_tokens=8, hidden=128, topk=1)) as g:
        g.noop(0).wait()
    group.leave(); session.detach()
    del group, session, ticket, pending, dropped, b, calls, call
    gc.collect()
    print(bad, flush=True)
    os._exit(len(bad))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert b.x[0] == 5 and group.buffers(0).recv_x[0] == 5
pending.wait()
dropped.wait()
assert not pending.pending and group.active(0) and not group.active(7)
group.dispatch(1, 0).wait()
session.check()
print("parent is well")
""",
    )
    assert out == "[]\nparent is well\n"


def test_fork_while_threads_call(daemon: Daemon) -> None:
    """multiprocessing forks beside a thread that submits and hooks that run; the child leaves by exit."""
    out = run(
        daemon,
        """
import multiprocessing
session = epd.attach(socket); group = session.join(config)
end = threading.Event(); seen = []
def work():
    while not end.is_set():
        group.noop(0).wait()
        group.noop(1).on_complete(seen.append)
        time.sleep(0.001)
thread = threading.Thread(target=work); thread.start()
def body(queue):
    try: group.noop(2)
    except epd.InvalidArgument: queue.put("typed")
context = multiprocessing.get_context("fork")
import warnings; warnings.simplefilter("ignore")
for _ in range(5):
    queue = context.SimpleQueue()
    child = context.Process(target=body, args=(queue,)); child.start()
    assert queue.get() == "typed"; child.join(); assert child.exitcode == 0
end.set(); thread.join()
group.noop(3).wait()
print(len(seen) > 0)
""",
    )
    assert out == "True\n"


def test_hooks(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session, session.join(shape()) as group:
        results: list[Any] = []
        done = threading.Event()
        for slot in range(3):
            ticket = group.dispatch(slot, 0)
            ticket.on_complete(results.append)
            assert repr(ticket) == "Dispatch(empty)"
            with pytest.raises(epd.NotFound, match="empty"):
                ticket.wait()
            with pytest.raises(epd.NotFound, match="empty"):
                ticket.on_complete(print)
        group.noop(3).on_complete(lambda result: done.set())
        assert done.wait(10)
        assert [result.op_index for result in results] == [0, 1, 2]
        assert all(result.status == epd.Status.OK for result in results)


def test_a_hook_may_leave_and_what_it_raises_is_shown(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_value))
    session = epd.attach(daemon.socket)
    group = session.join(shape())
    group.noop(0).on_complete(lambda result: 1 / 0)
    left = threading.Event()
    group.noop(1).on_complete(lambda result: (group.leave(), left.set()))
    assert left.wait(10)
    assert [type(error) for error in shown] == [ZeroDivisionError]
    daemon.wait_for(lambda: num_groups(daemon) == 0)
    session.detach()


def test_a_hook_that_raises_is_shown_by_the_interpreter_and_the_next_one_runs(daemon: Daemon) -> None:
    """The hook is the interpreter's own sys.unraisablehook."""
    code = """
done = threading.Event()
def bad(result): raise ValueError("of a hook")
with epd.attach(socket) as session, session.join(config) as group:
    group.noop(0).on_complete(bad)
    group.noop(1).on_complete(lambda result: sys.exit("leaves"))
    group.noop(2).on_complete(lambda result: done.set())
    print(done.wait(10))
"""
    ended = run_python(PREAMBLE + code, daemon.socket)
    assert ended.stdout == "True\n", ended.stderr
    assert "the completion hook <function bad" in ended.stderr and "ValueError: of a hook" in ended.stderr
    assert "SystemExit: leaves" in ended.stderr and "TypeError" not in ended.stderr


def test_what_a_hook_raised_keeps_no_group(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    session = epd.attach(daemon.socket)
    group = session.join(shape())
    group.noop(0).on_complete(lambda result, keeps=group: 1 / 0)
    gc.disable()
    try:
        del group
        daemon.wait_for(lambda: num_groups(daemon) == 0)
    finally:
        gc.enable()
    session.detach()


def test_only_a_callable_is_a_hook(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session, session.join(shape()) as group:
        ticket = group.noop(0)
        with pytest.raises(TypeError, match="hook is 5; allowed: a callable"):
            ticket.on_complete(5)  # type: ignore[arg-type]
        assert ticket.wait().status == epd.Status.OK


def test_the_thread_of_hooks_ends_with_its_group(daemon: Daemon) -> None:
    session = epd.attach(daemon.socket)
    group = session.join(shape())
    group.noop(0).on_complete(lambda result: None)
    assert any(thread.name == "epd-hooks" for thread in threading.enumerate())
    del group
    daemon.wait_for(lambda: all(thread.name != "epd-hooks" for thread in threading.enumerate()))
    session.check()


HOOKS = """
for i in range(150):
    with epd.attach(socket, "host:0") as session:
        group = session.join(epd.GroupConfig(**{**vars(config), "name": f"{name}-{i}"}))
        group.buffers(0).topk_idx[:] = memoryview(bytes(32)).cast("i")
        tickets = [group.dispatch(slot, 8) for slot in range(4)]
        try:
            for ticket in tickets:
                ticket.on_complete(HOOK)
        except epd.InvalidArgument:  # a hook has detached
            pass
    del tickets, ticket, group, session
print("well")
"""


@pytest.mark.parametrize("hook", ["lambda result: None", "lambda result, session=session: session.detach()"])
def test_a_session_ends_behind_the_hooks_that_wait(daemon: Daemon, hook: str) -> None:
    """A hook that waits keeps its membership, and that the attachment, whoever goes first."""
    assert run(daemon, HOOKS.replace("HOOK", hook), seconds=120) == "well\n"


def test_a_membership_keeps_its_session(daemon: Daemon) -> None:
    session = epd.attach(daemon.socket)
    group = session.join(shape())
    owner = group._owner()
    assert not session.detach()
    del session
    assert group.leave() is False and is_listed(daemon, group)
    del owner
    assert group.leave()
    daemon.wait_for(lambda: not is_listed(daemon, group))
