"""Each status as its exception, by what really provokes it, with what the exception tells."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pathlib
import pickle
import re
import signal
import socket
import struct
import threading
import time
from typing import Any, Callable

import pytest
from conftest import BUILD, HOST_DEVICES, Daemon, Ranks, run_python, shape, with_rank

import epd


@pytest.fixture
def group(daemon: Daemon) -> Any:
    with epd.attach(daemon.socket, "host:0") as session, session.join(shape()) as joined:
        yield joined


def raised(kind: type[epd.Error], call: Callable[[], object]) -> epd.Error:
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind and error.status == kind.status and error.text
    assert str(error) == f"{error.status.name}: {error.text}"
    return error


def test_would_block(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        ticket = groups[0].dispatch(0, 0)
        raised(epd.WouldBlock, lambda: groups[0].dispatch(0, 0))
        raised(epd.WouldBlock, lambda: ticket.wait(epd.NO_WAIT))
        assert ticket.pending and ticket.poll() is None
        late = raised(epd.DeadlineExceeded, lambda: ticket.wait(10))
        assert isinstance(late, TimeoutError) and ticket.pending
        groups[1].dispatch(0, 0).wait()
        assert ticket.wait().status == epd.Status.OK and not ticket.pending


def test_invalid_argument_tells_field_value_and_what_is_allowed(group: epd.Group) -> None:
    error = raised(epd.InvalidArgument, lambda: group.dispatch(0, 9))
    assert isinstance(error, ValueError)
    assert (
        (error.field, error.value) == ("num_tokens", "9") and error.allowed is not None and "8" in error.allowed
    )
    for slot in (4, -1, 1 << 32):
        for call in (group.noop, group.buffers, lambda s: group.dispatch(s, 0)):
            error = raised(epd.InvalidArgument, lambda call=call, slot=slot: call(slot))
            assert error.value == str(slot)
    error = raised(epd.InvalidArgument, lambda: group.dispatch(0, 1, timeout_ms=1 << 40))
    assert error.field == "timeout_ms" and error.allowed == f"0 .. {(1 << 31) - 1}"
    assert "stream" in raised(epd.InvalidArgument, lambda: group.noop(0, stream=0)).text
    ticket = group.noop(0)
    for late in (ticket.wait, group.resume):
        for wrong in (-3, 1 << 32, -(1 << 40)):
            assert raised(epd.InvalidArgument, lambda late=late, wrong=wrong: late(wrong)).value == str(wrong)
    ticket.wait()
    with pytest.raises(TypeError, match="num_tokens"):
        group.dispatch(0, "many")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cuda_stream"):
        group.noop(0, stream="s")


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"hidden": 100}, "hidden"),
        ({"num_experts": 3, "num_ranks": 2}, "num_experts"),
        ({"name": "a b"}, "name"),
        ({"topk": 33}, "topk"),
        ({"depth": -1}, "depth"),
        ({"name": "a\0b"}, "name"),
    ],
)
def test_a_shape_that_is_not_allowed(daemon: Daemon, fields: dict[str, Any], name: str) -> None:
    with epd.attach(daemon.socket) as session:
        assert name in raised(epd.InvalidArgument, lambda: session.join(shape(**fields))).text


NUMBERS = (
    "num_ranks num_experts max_tokens hidden topk depth payload index_type policy layout scale_format "
    "expert_alignment opaque_bytes num_biases num_handles max_recv_rows sum_ranks span scale_layout range_format "
    "shared_regions"
).split()


@pytest.mark.parametrize("field", [*NUMBERS, "priority", "rank"])
def test_a_number_that_no_field_holds_is_told_what_the_library_allows(daemon: Daemon, field: str) -> None:
    """The library judges numbers that a field can hold: it names the same highest value."""
    more_than_allowed = 100 if field == "priority" else (1 << 31) - 1 if field == "rank" else (1 << 32) - 1
    with epd.attach(daemon.socket) as session:
        ours = raised(epd.InvalidArgument, lambda: session.join(shape(**{field: -(1 << 40)})))
        library = raised(epd.InvalidArgument, lambda: session.join(shape(**{field: more_than_allowed})))
    assert ours.field == field and ours.value == str(-(1 << 40))
    assert ours.allowed is not None and library.allowed is not None
    if field not in ("rank", "sum_ranks"):
        highest = re.findall(r"\.\. (-?\d+)", library.allowed)
        assert re.findall(r"\.\. (-?\d+)", ours.allowed) == highest and len(highest) == 1, library.text


class Index:
    """An integer, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return other == self.value


def test_values_of_the_wrong_type_are_named(daemon: Daemon, group: epd.Group) -> None:
    wrong: Any = {"a": 1}
    with epd.attach(daemon.socket) as session:
        for value in (5, None, 1.5):
            with pytest.raises(TypeError, match=f"name is {value}; allowed: text"):
                session.join(shape(name=value))
        with pytest.raises(TypeError, match="config is {'a': 1}; allowed: a GroupConfig"):
            session.join(wrong)
        with pytest.raises(TypeError, match="num_ranks is 1.0; allowed: an integer"):
            session.join(shape(num_ranks=1.0))
        with pytest.raises(TypeError, match="more_formats is 5; allowed: a tuple or list"):
            session.join(shape(more_formats=5))
        with pytest.raises(TypeError, match="more_formats has 5; allowed: a RowFormat"):
            session.join(shape(more_formats=[5]))
        for size in ("x", 1.5):
            with pytest.raises(TypeError, match=f"bytes is {size!r}; allowed: an integer"):
                session.register(4096, size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="socket_path is 5; allowed: None, text, or a path"):
        epd.attach(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device is 5; allowed: None, or text"):
        epd.attach(daemon.socket, 5)  # type: ignore[arg-type]
    for handle in (12345, group.dispatch(1, 0)):
        with pytest.raises(TypeError, match="handle is .*; allowed: None, or a Dispatch.handle"):
            group.combine(0, handle)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="handle is 12345; allowed: None, or a Dispatch.handle"):
        group.dispatch(0, handle=12345)  # type: ignore[arg-type]
    has_torch = importlib.util.find_spec("torch") is not None
    for call in (group.buffers, group.numpy, *([group.tensors] if has_torch else [])):
        with pytest.raises(TypeError, match="row_format is 1.0; allowed: an integer"):
            call(0, 1.0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="slot is 1.0; allowed: an integer"):
            call(1.0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"slot is \[\]; allowed: an integer"):
            call([])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"row_format is \{\}; allowed: an integer"):
            call(0, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="row_format is 1.0; allowed: an integer"):
        group.dispatch(0, row_format=1.0)  # type: ignore[arg-type]
    ticket = group.dispatch(2, 0)
    assert group.buffers(Index(1)) is group.buffers(1) and group.noop(Index(1)).wait().status == epd.Status.OK
    for value in ("x", None, 1.5):
        for wait in (ticket.wait, ticket.counts, ticket.wait_sent, group.resume):
            with pytest.raises(TypeError, match=f"timeout_ms is {value!r}; allowed: 1 .. "):
                wait(value)
        with pytest.raises(TypeError, match=f"slot is {value!r}; allowed: an integer"):
            group.noop(value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"rank is {value!r}; allowed: an integer"):
            group.active(value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"omit_weights is {value!r}; allowed: True or False"):
            group.dispatch(0, omit_weights=value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"weighted is {value!r}; allowed: True or False"):
            group.combine(0, ticket.handle, weighted=value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"recv_rows is {value!r}; allowed: an integer"):
            epd.Memory(recv_rows=value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"region is {value!r}; allowed: a Region"):
            shape().region_bytes(value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"kind is {value!r}; allowed: a DeviceKind"):
            shape().group_bytes(value)  # type: ignore[arg-type]
    assert raised(epd.InvalidArgument, lambda: shape().region_bytes(1 << 40)).field == "region"  # type: ignore[arg-type]
    assert raised(epd.InvalidArgument, lambda: group.dispatch(0, keep_handle=-1)).field == "keep_handle"
    error = raised(epd.InvalidArgument, lambda: group.combine(0, group.dispatch(0, 0).handle, num_biases=-1))
    assert (error.field, error.allowed) == ("num_biases", "0 .. 0")
    error = raised(epd.InvalidArgument, lambda: group.dispatch(Index(0), -1))  # type: ignore[arg-type]
    assert (error.field, error.allowed) == ("num_tokens", "0 .. 8")


def test_a_path_names_a_socket(daemon: Daemon) -> None:
    with epd.attach(pathlib.Path(daemon.socket)) as session:
        session.check()


def test_ranks_that_disagree_are_told_both_values(daemon: Daemon) -> None:
    config = shape(num_ranks=2)
    with epd.attach(daemon.socket) as first, epd.attach(daemon.socket) as second:
        waiting = threading.Thread(target=lambda: first.join(config))
        waiting.start()
        daemon.wait_for(lambda: config.name in daemon.epctl("groups").stdout)
        error = raised(epd.InvalidArgument, lambda: second.join(with_rank(config, 1, hidden=256)))
        assert "256" in error.text and "128" in error.text
        second.join(with_rank(config, 1))
        waiting.join()


def test_not_found(daemon: Daemon, group: epd.Group) -> None:
    assert "host:9" in raised(epd.NotFound, lambda: epd.attach(daemon.socket, "host:9")).text
    ticket = group.dispatch(0, 0)
    ticket.wait()
    raised(epd.NotFound, ticket.wait)


def test_permission_denied(own_daemon: Callable[..., Daemon]) -> None:
    rule = f'access.default = "deny"\naccess.rule = [{{users = [{os.getuid()}], devices = ["host:1"]}}]'
    running = own_daemon(f"{HOST_DEVICES}\n{rule}")
    assert "access.rule 1" in raised(epd.PermissionDenied, lambda: epd.attach(running.socket, "host:0")).text
    with epd.attach(running.socket) as session:
        assert session.info.device == "host:1"


def test_resource_exhausted(own_daemon: Callable[..., Daemon]) -> None:
    running = own_daemon(f"{HOST_DEVICES}\nlimits.max_sessions = 1")
    with epd.attach(running.socket):
        assert "max_sessions" in raised(epd.ResourceExhausted, lambda: epd.attach(running.socket)).text


def test_too_many_rows(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2, max_recv_rows=3)) as groups:
        for group in groups:
            b = group.buffers(0)
            for i in range(len(b.topk_idx)):
                b.topk_idx[i] = 0
        tickets = [group.dispatch(0, 2) for group in groups]
        for ticket in tickets:
            raised(epd.ResourceExhausted, ticket.wait)


def test_version_mismatch(tmp_path: Any) -> None:
    """A daemon of another version: it answers the hello with version 42."""
    path = str(tmp_path / "epd.sock")
    header = struct.Struct("@IHHII")  # magic, type, descriptors, bytes, request
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(1)

    def serve() -> None:
        connection, _ = listener.accept()
        hello = connection.recv(65536)
        magic, _, _, _, request = header.unpack_from(hello)
        nonce = struct.unpack_from("@IIQQQ", hello, header.size)[4]
        welcome = struct.pack(
            "@IIQQQQ16s64s32sI16sI", 42, 0, 1, 0, nonce, 1, b"", b"epd 9.9", b"host:0", 0, b"", 0
        )
        connection.send(header.pack(magic, 2, 0, header.size + len(welcome), request) + welcome)
        connection.recv(1)
        connection.close()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    error = raised(epd.VersionMismatch, lambda: epd.attach(path))
    assert "epd 9.9" in error.text and "version 42" in error.text
    server.join(5)
    listener.close()


def fails(check: Callable[[], object]) -> bool:
    try:
        check()
        return False
    except epd.Error:
        return True


def test_deadline_exceeded_names_the_missing_ranks(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session:
        error = raised(epd.DeadlineExceeded, lambda: session.join(shape(num_ranks=2, timeout_ms=100)))
        assert error.rank == 1


def test_an_operation_misses_its_deadline_and_the_group_resumes(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        ticket = groups[0].dispatch(0, 0, timeout_ms=200)
        error = raised(epd.DeadlineExceeded, ticket.wait)
        assert error.rank == 1 and not ticket.pending  # the rank that did not come
        raised(epd.DeadlineExceeded, groups[0].check)
        daemon.wait_for(lambda: fails(groups[1].check))  # else its resume would find nothing to resume
        other = threading.Thread(target=groups[1].resume)
        other.start()
        info = groups[0].resume(20000)
        other.join()
        assert info.resume_op == 0 and info.num_active_ranks == 2
        for redo in [group.dispatch(0, 0) for group in groups]:
            redo.wait()
        assert groups[0].check().next_op == 1


def test_rank_lost(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        results: list[epd.Result] = []
        ticket = groups[0].dispatch(0, 0)
        hooked = groups[0].dispatch(1, 0)
        hooked.on_complete(results.append)
        groups[1].leave()
        assert raised(epd.RankLost, ticket.wait).rank == 1
        raised(epd.NotFound, ticket.wait)
        raised(epd.RankLost, lambda: groups[0].noop(2).wait())
        daemon.wait_for(lambda: len(results) == 1)
        assert results[0].status == epd.Status.RANK_LOST and results[0].failed_rank == 1


def test_an_advance_goes_on_without_a_lost_rank(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2, policy=epd.Policy.DEGRADE)) as (group, other):
        assert group.advance() == (None, epd.ResumeInfo(1, 0, 2))
        tickets = [each.dispatch(0, 2) for each in (group, other)]
        result, at = group.advance(tickets[0])
        assert result is not None and result.op_index == 0 and at == (1, 1, 2)
        raised(epd.NotFound, tickets[0].wait)  # it is empty
        ticket = group.dispatch(1, 0)
        raised(epd.DeadlineExceeded, lambda: group.advance(ticket, 300))
        raised(epd.WouldBlock, lambda: group.advance(ticket, epd.NO_WAIT))
        assert ticket.pending
        other.leave()
        assert group.advance(ticket) == (None, (2, 1, 1)) and not ticket.pending
        ticket = group.dispatch(1, 1)
        result, at = group.advance(ticket)
        assert result is not None and result.num_recv_rows == at.num_active_ranks == 1 and at.resume_op == 2
        assert group.advance(ticket) == group.advance() == (None, at)  # nothing is wrong
        group.combine(1, ticket.handle).wait()  # it knows how many rows there are


def test_an_advance_raises_what_a_repetition_would_not_mend(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        tickets = [group.dispatch(group.rank, 0) for group in groups]  # on slots that differ
        for group, ticket in zip(groups, tickets):
            raised(epd.InvalidArgument, lambda group=group, ticket=ticket: group.advance(ticket))
            raised(epd.InvalidArgument, lambda group=group: group.noop(1))
        for wrong in (-3, 1 << 32):
            assert raised(epd.InvalidArgument, lambda wrong=wrong: groups[0].advance(None, wrong)).value == str(wrong)
        assert groups[0].advance() == (None, (2, 0, 2))  # if the caller wants it
        gc.collect()  # tracebacks keep the membership
        groups[1].leave()
        daemon.wait_for(lambda: fails(groups[0].check))
        raised(epd.RankLost, groups[0].advance)
    raised(epd.InvalidArgument, groups[0].advance)


def test_degrade_goes_on_and_takes_the_rank_back(daemon: Daemon) -> None:
    config = shape(num_ranks=2, policy=epd.Policy.DEGRADE)
    with Ranks(daemon.socket, config) as groups:
        ticket = groups[0].dispatch(0, 0)
        mask = groups[0].active_mask()
        assert list(mask) == [1, 1]
        groups[1].leave()
        assert raised(epd.RankLost, ticket.wait).rank == 1
        assert list(mask) == [1, 1]  # until it resumes
        assert groups[0].resume().num_active_ranks == 1
        assert list(mask) == [1, 0] and mask.readonly
        assert groups[0].active(0) and not groups[0].active(1) and not groups[0].active(-1)
        b = groups[0].buffers(0)
        b.topk_idx[0], b.topk_idx[1] = 0, 3  # the second on the lost rank
        result = groups[0].dispatch(0, 1).wait()
        assert result.num_recv_rows == 1 and result.num_dropped_selections == 1
        with pytest.raises(epd.NotFound, match="handle 0"):
            groups[0].combine(0, None)
        b = groups[0].buffers(2)
        b.x[0], b.topk_idx[0] = 7, 0
        before = groups[0].dispatch(2, 1)
        before.wait()
        b.y[0] = b.recv_x[0]
        # A new process takes its place: that ends what is in flight with ABORTED.
        with epd.attach(daemon.socket, "host:1") as session:
            again: list[epd.Group] = []
            rejoining = threading.Thread(target=lambda: again.append(session.join(with_rank(config, 1))))
            rejoining.start()
            end = time.monotonic() + 10
            error: Any = None
            while error is None and time.monotonic() < end:
                try:
                    groups[0].dispatch(0, 0).wait()
                    time.sleep(0.01)
                except epd.Aborted as aborted:
                    error = aborted
            assert error is not None and error.rank == 1
            assert groups[0].resume().num_active_ranks == 2
            assert list(mask) == [1, 1]
            rejoining.join(10)
            # The newcomer has no handle of what was dispatched before.
            for redo in [groups[0].combine(2, before.handle), again[0].combine(2, None)]:
                redo.wait()
            assert b.out[0] == 7
            for redo in [group.dispatch(1, 0) for group in (groups[0], again[0])]:
                redo.wait()
            again[0].leave()


def test_a_rank_that_was_late_hears_its_own_rank_from_every_call(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2, policy=epd.Policy.DEGRADE_LATE)) as groups:
        assert raised(epd.RankLost, groups[0].dispatch(0, 0, timeout_ms=100).wait).rank == 1
        daemon.wait_for(lambda: fails(groups[1].check))
        for call in (groups[1].check, groups[1].resume, lambda: groups[1].dispatch(0, 0)):
            assert raised(epd.RankLost, call).rank == 1  # type: ignore[arg-type]


def test_engine_restarted(own_daemon: Callable[..., Daemon]) -> None:
    running = own_daemon()
    with Ranks(running.socket, shape(num_ranks=2)) as groups:
        groups[0].buffers(0).x[0] = 7
        ticket = groups[0].dispatch(0, 0)
        devices = json.loads(running.epctl("--json", "devices").stdout)["devices"]
        assert devices[0]["engine_pid"] > 0  # 0 and -1 name many processes to kill(2)
        os.kill(devices[0]["engine_pid"], signal.SIGKILL)
        errors = [raised(epd.EngineRestarted, lambda: ticket.wait(20000))]
        running.wait_for(lambda: fails(groups[1].check))
        errors += [raised(epd.EngineRestarted, group.check) for group in groups]
        for error in errors:  # one cause, one text
            assert error.rank == 0 and "ended: signal 9, not by epd" in error.text
        assert f'failed_rank=0 text="{errors[0].text}"' in running.log.read_text()
        others = threading.Thread(target=groups[1].resume)
        others.start()
        groups[0].resume(20000)
        others.join()
        for redo in [group.dispatch(0, 0) for group in groups]:
            redo.wait()
        assert groups[0].buffers(0).x[0] == 7  # the memory is the daemon's


def test_daemon_lost(own_daemon: Callable[..., Daemon]) -> None:
    raised(epd.DaemonLost, lambda: epd.attach("/nonexistent/epd.sock"))
    running = own_daemon()
    with epd.attach(running.socket) as session, session.join(shape(num_ranks=1)) as group:
        group.numpy(0).x[0, 0] = 3
        array = group.numpy(0).x
        running.process.kill()
        running.process.wait()
        raised(epd.DaemonLost, lambda: (time.sleep(0.2), session.check()))
        raised(epd.DaemonLost, lambda: group.noop(0).wait(5000))
        assert array[0, 0] == 3  # the mapping stays
        del array


def test_a_session_that_an_operator_has_ended_needs_a_new_attachment(daemon: Daemon) -> None:
    session = epd.attach(daemon.socket)
    group = session.join(shape())
    assert daemon.epctl("evict", "session", str(session.info.session_id), "--reason", "test").returncode == 0
    for call in (lambda: group.noop(0).wait(), group.check, lambda: group.resume(5000), session.check):
        daemon.wait_for(lambda: fails(session.check))
        assert "test" in raised(epd.Aborted, call).text
    session.detach()
    with epd.attach(daemon.socket) as session, session.join(shape()) as group:
        group.noop(0).wait()


def test_unsupported_without_a_driver_and_internal_with_its_error(own_daemon: Callable[..., Daemon]) -> None:
    fake = BUILD / "lib/fake_cuda"
    if not (fake / "libcuda.so.1").exists():
        pytest.skip("the fake CUDA driver is not built")
    running = own_daemon(
        'devices.host = 0\ndevices.cuda = [0]', {"LD_LIBRARY_PATH": str(fake)}
    )
    code = """
import sys, epd
try: epd.attach(sys.argv[1], "cuda:0")
except epd.Error as error: print(type(error).__name__, error.text)
"""
    without = run_python(code, running.socket, LD_LIBRARY_PATH="")
    assert without.stdout.startswith("Unsupported "), without.stdout + without.stderr
    failing = run_python(
        code, running.socket, LD_LIBRARY_PATH=str(fake), EPD_FAKE_CUDA_FAIL="cuDevicePrimaryCtxRetain:1:999"
    )
    assert failing.stdout.startswith("InternalError "), failing.stdout + failing.stderr


def test_after_leave_and_detach(daemon: Daemon) -> None:
    session = epd.attach(daemon.socket)
    group = session.join(shape())
    ticket = group.noop(0)
    assert session.detach()
    for call in (
        lambda: group.noop(0),
        group.check,
        group.resume,
        ticket.wait,
        lambda: group.buffers(0),
        ticket.wait_sent,
    ):
        assert "has been left" in raised(epd.InvalidArgument, call).text
    for call in (session.check, lambda: session.join(shape())):
        assert "has been detached" in raised(epd.InvalidArgument, call).text
    assert not ticket.pending and not group.active(0)


def test_waits_say_who_was_late(daemon: Daemon) -> None:
    config = shape(num_ranks=2)
    with Ranks(daemon.socket, config) as groups:
        before = groups[0].waits()
        assert before == epd.Waits([0, 0], [0, 0])
        early = groups[0].dispatch(0, 0)
        time.sleep(2)
        groups[1].dispatch(0, 0).wait()
        early.wait()
        on_time, late = groups[0].waits(), groups[1].waits()
        assert on_time.ready_ns[1] >= 50_000_000 and on_time.ready_ns[0] == 0  # an engine may begin late
        assert late.ready_ns[0] < on_time.ready_ns[1]
    assert raised(epd.InvalidArgument, groups[0].waits)


def test_errors_travel_between_processes() -> None:
    for kind in (epd.RankLost, epd.DeadlineExceeded, epd.InvalidArgument):
        error = pickle.loads(pickle.dumps(kind("topk is 40; allowed: 1 .. 32", rank=3)))
        assert type(error) is kind and error.rank == 3
        assert (error.field, error.value, error.allowed) == ("topk", "40", "1 .. 32")


def test_sizes_before_anybody_joins(daemon: Daemon) -> None:
    config = shape(num_ranks=2)
    assert config.region_bytes(epd.Region.X) == 8 * 128 * 2
    assert config.region_bytes(epd.Region.X_SCALES) == 0
    size = config.group_bytes(epd.DeviceKind.HOST)
    assert (
        size.group == 2 * size.rank
        and size.rank == size.user_arena + size.exchange_arena + size.board + size.results
    )
    raised(epd.InvalidArgument, lambda: shape(hidden=5).group_bytes(epd.DeviceKind.HOST))
    with epd.attach(daemon.socket, "host:2") as session:
        info = session.info
        assert info.device == "host:2" and info.device_kind == epd.DeviceKind.HOST
        assert info.daemon.startswith(f"epd {epd.version()}") and len(info.boot_id) == 32
