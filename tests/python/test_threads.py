"""Calls of many threads: they release the GIL, and nobody gets another's ticket or result."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
from conftest import Daemon, Ranks, shape

import epd


def run_threads(bodies: list[Any]) -> None:
    errors: list[BaseException] = []

    def guarded(body: Any) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


def test_a_wait_releases_the_gil(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        first = groups[0].dispatch(0, 0)
        waiting = threading.Thread(target=first.wait)
        waiting.start()
        for _ in range(1000):
            time.sleep(0)
        assert waiting.is_alive()  # this thread continued while that one waited
        groups[1].dispatch(0, 0).wait()
        waiting.join(10)
        assert not waiting.is_alive()


def test_threads_on_slots_of_one_group(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session, session.join(shape(depth=8)) as group:
        seen: list[list[int]] = [[] for _ in range(8)]

        def work(slot: int) -> None:
            for _ in range(100):
                seen[slot].append(group.dispatch(slot, 0).wait().op_index)

        run_threads([lambda slot=slot: work(slot) for slot in range(8)])
        assert sorted(index for indexes in seen for index in indexes) == list(range(800))
        assert all(indexes == sorted(indexes) for indexes in seen)


def test_rows_of_threads_are_not_mixed_up(daemon: Daemon) -> None:
    """Each slot's thread sends another number of tokens: arguments and results stay with their call."""
    with epd.attach(daemon.socket) as session, session.join(shape(depth=8, num_experts=1, topk=1)) as group:
        for slot in range(8):
            buffers = group.buffers(slot)
            for token in range(8):
                buffers.topk_idx[token] = 0

        def work(slot: int) -> None:
            for _ in range(60):
                assert group.dispatch(slot, slot).wait().num_recv_rows == slot

        run_threads([lambda slot=slot: work(slot) for slot in range(8)])


def test_sessions_come_and_go_in_threads(daemon: Daemon) -> None:
    def work(number: int) -> None:
        for _ in range(5):
            with epd.attach(daemon.socket) as session, session.join(shape()) as group:
                group.buffers(0).x[0] = number
                group.noop(0).wait()

    run_threads([lambda n=n: work(n) for n in range(4)])


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_group_is_left_while_another_thread_waits(daemon: Daemon, seconds: float) -> None:
    """leave waits for that thread's call, which ends when the operation does, however many slices that takes."""
    with Ranks(daemon.socket, shape(num_ranks=2)) as groups:
        ticket = groups[0].dispatch(0, 0)
        outcome: list[Any] = []
        handle = groups[0]._handle
        before = sys.getrefcount(handle)
        thread = threading.Thread(target=lambda: outcome.append(ticket.wait().status))
        thread.start()
        daemon.wait_for(lambda: sys.getrefcount(handle) > before)
        del handle
        assert not groups[0].leave()  # the call that waits keeps the membership
        time.sleep(seconds)
        groups[1].dispatch(0, 0).wait()
        thread.join(10)
        assert outcome == [epd.Status.OK]
        assert groups[0].leave()
