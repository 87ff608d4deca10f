"""deep_ep's low-latency mode on host devices, with ranks that are masked, late, gone or slow."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import pathlib
import re
import signal
import sys
import threading
import time
import types
import weakref
from typing import Any, Callable, Iterator, Optional

import pytest
from conftest import HOST_DEVICES, ROOT, Daemon

torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)
sys.path.append(str(ROOT / "client/deep_ep"))

from deep_ep import groups, low_latency, places  # noqa: E402
from deep_ep.masks import Masks  # noqa: E402
from deep_ep.shrink import Attempt, Steps  # noqa: E402
from deep_ep.watch import Watch  # noqa: E402
from rank_processes import RankProcesses  # noqa: E402

import epd  # noqa: E402

PATH = [str(ROOT / folder) for folder in ("client/python", "client/deep_ep", "tests/python")]
CASES = "deep_ep_shrink_cases"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    running = Daemon(HOST_DEVICES)
    yield running
    assert running.stop() == 0


@contextlib.contextmanager
def processes(size: int, daemon: Daemon) -> Iterator[RankProcesses]:
    ranks = RankProcesses(size, daemon.socket, PATH)
    try:
        yield ranks
    finally:
        ranks.stop()


@pytest.fixture(scope="module")
def four(daemon: Daemon) -> Iterator[RankProcesses]:
    with processes(4, daemon) as ranks:
        yield ranks


@pytest.mark.parametrize("form", ["bf16", "fp8", "ue8m0"])
@pytest.mark.parametrize("hooks", [False, True])
def test_masks(four: RankProcesses, form: str, hooks: bool) -> None:
    four.run(f"{CASES}.masks", form=form, hooks=hooks)


def test_refusals(four: RankProcesses) -> None:
    four.run(f"{CASES}.refusals")


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_interrupted_calls(four: RankProcesses, form: str) -> None:
    four.run(f"{CASES}.interrupted_calls", form=form)


def test_ends_at_other_times(four: RankProcesses) -> None:
    four.run(f"{CASES}.ends_at_other_times")


@pytest.mark.parametrize("shrink, hooks, slow", [(False, False, 0), (False, True, 2), (True, True, 3)])
def test_slow_rank(four: RankProcesses, shrink: bool, hooks: bool, slow: int) -> None:
    four.run(f"{CASES}.slow_rank", slow=slow, shrink=shrink, hooks=hooks)


def test_one_is_silent(own_daemon: Callable[..., Daemon]) -> None:
    """A rank that misses the deadline of an operation is lost, and comes back when all clean their masks."""
    impatient = own_daemon(f"{HOST_DEVICES}\ntimeouts.operation_ms = 5000")
    with processes(4, impatient) as ranks:
        for hooks in (False, True):
            answers = ranks.run(f"{CASES}.one_is_silent", hooks=hooks)
            assert answers == ["went on"] * 4


@pytest.mark.parametrize("form, hooks", [("bf16", False), ("fp8", True)])
def test_some_are_killed(daemon: Daemon, form: str, hooks: bool) -> None:
    with processes(4, daemon) as ranks:
        answers = ranks.run(f"{CASES}.some_are_killed", gone=(1, 2), form=form, hooks=hooks)
    assert answers == ["went on", None, None, "went on"]


@pytest.mark.parametrize("seed, hooks", [(1, False), (2, True)])
def test_killed_at_any_time(daemon: Daemon, seed: int, hooks: bool) -> None:
    with processes(4, daemon) as ranks:
        answers = ranks.run(f"{CASES}.killed_at_any_time", gone=(1, 3), seed=seed, hooks=hooks)
    assert answers == ["went on", None, "went on", None]


def test_engines_die(four: RankProcesses, daemon: Daemon, tmp_path: pathlib.Path) -> None:
    """Operations that some ranks have completed, and another one not, are made again by all."""
    begun, stop = tmp_path / "begun", tmp_path / "stop"

    def kill() -> None:
        daemon.wait_for(begun.exists, 60)
        for turn in range(3):
            time.sleep(0.3)
            started = re.findall(r'"engine started" device="host:(\d)" pid=(\d+)', daemon.log.read_text())
            ready = daemon.log.read_text().count("engine ready")
            os.kill(int(dict(started)[str(turn)]), signal.SIGKILL)  # the last that was started
            daemon.wait_for(lambda: daemon.log.read_text().count("engine ready") > ready)
        stop.touch()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        killing = threads.submit(kill)
        breaks = four.run(f"{CASES}.engines_die", begun=str(begun), stop=str(stop))
        killing.result()
    assert all(breaks), breaks  # deaths that come soon after each other may be one break


# ---- what is repeated after a break -----------------------------------------------------------------


class FakeGroup:
    """Breaks, and resumes at these operations."""

    config = epd.GroupConfig(max_tokens=4)

    def __init__(self, resume_at: list[int]) -> None:
        self.resume_at = resume_at

    def check(self) -> None:
        if self.resume_at:
            raise epd.EngineRestarted("the engine is back")

    def advance(self, ticket: Any = None) -> tuple[Optional[epd.Result], epd.ResumeInfo]:
        with contextlib.suppress(*epd.BREAKS):
            if ticket is not None:
                result = ticket.wait()
                return result, epd.ResumeInfo(1, result.op_index + 1, 1)
        resume_op = self.resume_at.pop(0)
        if resume_op < 0:
            raise epd.RankLost("this rank is lost")
        return None, epd.ResumeInfo(2, resume_op, 1)


class FakeJoined:
    def __init__(self, resume_at: list[int]) -> None:
        self.group = FakeGroup(resume_at)

    def settle(self) -> None:
        pass

    def submit_now(self, submission: Any, *arguments: Any) -> Any:
        return submission(*arguments)


class FakeStep:
    """Each attempt is written down. outcomes: the numbers of operations that go well, or errors: of the submission if
    it is a tuple, else of the operation."""

    def __init__(self, name: str, outcomes: list[Any], log: list[str]) -> None:
        self.name, self.outcomes, self.log = name, outcomes, log
        self.stream: Any = None

    def submit(self, attempt: Attempt) -> Any:
        outcome = self.outcomes.pop(0)
        self.log.append(f"{self.name} {attempt.name}")
        if isinstance(outcome, tuple):
            raise outcome[0]
        return FakeTicket(outcome)

    def submitted(self) -> None:
        pass

    def completed(self) -> None:
        self.log.append(f"{self.name} completed")

    def repeated(self) -> None:
        self.log.append(f"{self.name} repeated")


class FakeTicket:
    pending = False

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def wait(self, timeout_ms: int = epd.FOREVER) -> Any:
        if isinstance(self.outcome, BaseException):
            outcome, self.outcome = self.outcome, 5
            try:
                raise outcome
            finally:
                del outcome
        return epd.Result(epd.Status.OK, -1, self.outcome, 0, 0, 0, 0, 0, 1)


LOST = epd.RankLost("rank 2 is lost")
LATE = epd.DeadlineExceeded("rank 1 has not submitted it")


@pytest.mark.parametrize(
    "first, second, resume_at, log",
    [
        ([5], [6], [], "a FIRST, a completed, b FIRST, b completed"),
        ([5], [LATE, 6], [6], "a FIRST, a completed, b FIRST, b AGAIN, b completed"),
        ([5], [(LOST,), 6], [6], "a FIRST, a completed, b FIRST, b FIRST, b completed"),
        (
            [5, 5],
            [LOST, 6],
            [5],
            "a FIRST, a completed, b FIRST, a REPEAT, a repeated, b AGAIN, b completed",
        ),
        (  # another rank is lost while the first is made again
            [5, LOST, (LATE,), 5],
            [(LOST,), 6],
            [5, 5, 5],
            "a FIRST, a completed, b FIRST, a REPEAT, a REPEAT, a REPEAT, a repeated, b FIRST, b completed",
        ),
        (
            [5, LOST],
            [LOST, LOST, 6],
            [5, 6, 6],
            "a FIRST, a completed, b FIRST, a REPEAT, b AGAIN, b AGAIN, b completed",
        ),
        ([LOST, LOST, 5], [6], [5, 5], "a FIRST, a AGAIN, a AGAIN, a completed, b FIRST, b completed"),
    ],
)
def test_what_is_repeated(first: list[Any], second: list[Any], resume_at: list[int], log: str) -> None:
    written: list[str] = []
    joined: Any = FakeJoined(resume_at)
    steps = Steps()
    for name, outcomes in (("a", first), ("b", second)):
        step: Any = FakeStep(name, outcomes, written)
        steps.begin(joined, step)
        steps.end(joined, step)
    assert ", ".join(written) == log
    assert not first and not second and not resume_at


@pytest.mark.parametrize(
    "first, second, resume_at, log",
    [
        ([5], [6], [6], "a FIRST, a completed, look, b FIRST, look, b completed"),
        ([5, 5], [6], [5], "a FIRST, a completed, look, a REPEAT, a repeated, b FIRST, look, b completed"),
        ([5, LOST, 5], [6], [5, 5], "a FIRST, a completed, look, a REPEAT, a REPEAT, a repeated, b FIRST, look, b completed"),
        ([5], [6], [-1], "a FIRST, a completed, look, lost"),
        # From here on the break is between an operation and its hook.
        ([5], [LOST, 6], [0, 6], "a FIRST, a completed, b FIRST, look, b AGAIN, b completed"),
        ([5], [LOST, LOST, 6], [0, 6, 6], "a FIRST, a completed, b FIRST, look, b AGAIN, b AGAIN, b completed"),
        ([5], [6, 6], [0, 6], "a FIRST, a completed, b FIRST, look, b AGAIN, b completed"),
        ([5], [6], [0, 7], "a FIRST, a completed, b FIRST, look, b completed"),
        ([5, 5], [LOST, 6], [0, 5], "a FIRST, a completed, b FIRST, look, a REPEAT, a repeated, b AGAIN, b completed"),
        ([5], [LOST, (LOST,)], [0, -1], "a FIRST, a completed, b FIRST, look, lost, b AGAIN"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_the_caller_is_elsewhere(
    first: list[Any], second: list[Any], resume_at: list[int], log: str, check: bool
) -> None:
    """Breaks are made up for between the caller's calls. resume_at begins with 0: not before the second operation.
    check: the caller asks for the mask, which takes notice as well."""
    first, second, resume_at = list(first), list(second), list(resume_at)
    written: list[str] = []
    later = resume_at[0] == 0
    group_resumes_at = [] if later else resume_at
    joined: Any = FakeJoined(group_resumes_at)
    steps = Steps()
    one: Any = FakeStep("a", first, written)
    two: Any = FakeStep("b", second, written)
    steps.begin(joined, one)
    steps.end(joined, one)
    steps.taken(None)

    def look() -> None:
        written.append("look")
        if check:
            with contextlib.suppress(epd.RankLost):
                steps.check(joined, None)
        else:
            steps.look(joined, None)

    if not later:
        look()
    if not steps.out:
        steps.begin(joined, two)
        joined.group.resume_at += resume_at[1:] if later else []
        look()
    if steps.out:
        written.append("lost")
        if later:
            joined.group.resume_at += [-1]  # as libepd does, each time
            with pytest.raises(epd.RankLost):
                steps.end(joined, two)
    else:
        steps.end(joined, two)
    assert ", ".join(written) == log
    assert not first and (steps.out or not second) and not joined.group.resume_at


def test_nothing_is_made_up_for_inside_of_calls() -> None:
    """Nor before the break has reached the operation."""
    written: list[str] = []
    joined: Any = FakeJoined([])
    steps = Steps()
    step: Any = FakeStep("a", [LOST, 5], written)
    ticket = steps.begin(joined, step)
    joined.group.resume_at = [5]
    ticket.pending = True  # type: ignore[misc]
    steps.look(joined, None)
    ticket.pending = False  # type: ignore[misc]
    with steps.lock:
        other = threading.Thread(target=steps.look, args=(joined, None))
        other.start()
        other.join()
    assert written == ["a FIRST"] and joined.group.resume_at == [5]
    steps.look(joined, None)
    steps.end(joined, step)
    assert ", ".join(written) == "a FIRST, a AGAIN, a completed"


def run_until_repeat(outcomes: list[Any]) -> tuple[Steps, Any, list[str]]:
    """One operation, number 5, has completed; another rank has not; this one has looked."""
    written: list[str] = []
    joined: Any = FakeJoined([])
    steps = Steps()
    step: Any = FakeStep("a", [5, *outcomes], written)
    steps.begin(joined, step)
    steps.end(joined, step)
    steps.taken(None)
    joined.group.resume_at = [5]
    with contextlib.suppress(MemoryError):
        steps.look(joined, None)
    return steps, joined, written


@pytest.mark.parametrize("how", ["look", "call"])
@pytest.mark.parametrize("fails", [(MemoryError(),), (epd.ResourceExhausted("full"),), epd.ResourceExhausted("full")])
def test_a_repetition_that_fails_stays_due(how: str, fails: Any) -> None:
    steps, joined, written = run_until_repeat([fails, 5])
    assert written.pop() == "a REPEAT" and joined.group.resume_at == []
    if how == "look":
        steps.look(joined, None)
    else:
        steps.begin(joined, FakeStep("b", [6], written))  # type: ignore[arg-type]
    expected = "a FIRST, a completed, a REPEAT, a repeated" + (", b FIRST" if how == "call" else "")
    assert ", ".join(written) == expected


def test_an_interrupted_repetition_goes_on() -> None:
    steps, joined, written = run_until_repeat([5])
    assert ", ".join(written) == "a FIRST, a completed, a REPEAT, a repeated"
    steps, joined, written = run_until_repeat([(MemoryError(),), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        steps.look(joined, None)
    steps.look(joined, None)
    assert ", ".join(written) == "a FIRST, a completed, a REPEAT, a REPEAT, a repeated"


def test_nothing_is_repeated_before_results_are_taken_and_of_groups_with_graphs() -> None:
    for untaken in (True, False):
        written: list[str] = []
        joined: Any = FakeJoined([])
        steps = Steps()
        step: Any = FakeStep("a", [5, 5], written)
        steps.begin(joined, step)
        steps.end(joined, step)
        if not untaken:
            steps.captured()
        joined.group.resume_at = [5]
        steps.look(joined, None)
        assert joined.group.resume_at == [5]
        steps.taken(None)
        if not untaken:
            steps.look(joined, None)
            assert joined.group.resume_at == [5]
        steps.check(joined, None)
        assert ", ".join(written) == "a FIRST, a completed, a REPEAT, a repeated"


def test_an_end_that_is_interrupted_goes_on() -> None:
    written: list[str] = []
    joined: Any = FakeJoined([])
    steps = Steps()
    step: Any = FakeStep("a", [5], written)
    steps.begin(joined, step)
    completed = step.completed

    def interrupted() -> None:
        step.completed = completed
        raise KeyboardInterrupt

    step.completed = interrupted
    with pytest.raises(KeyboardInterrupt):
        steps.end(joined, step)
    steps.end(joined, step)
    assert ", ".join(written) == "a FIRST, a completed" and steps._last_index == 5


def test_an_error_of_the_operation_s_own_reaches_the_caller() -> None:
    written: list[str] = []
    joined: Any = FakeJoined([])
    steps = Steps()
    step: Any = FakeStep("a", [epd.ResourceExhausted("no room for its rows")], written)
    steps.begin(joined, step)
    joined.group.resume_at = [5]
    steps.look(joined, None)
    assert joined.group.resume_at == []
    with pytest.raises(epd.ResourceExhausted, match="no room"):
        steps.end(joined, step)
    assert written == ["a FIRST"]


def test_masks_are_cleaned_after_what_has_no_hook_called() -> None:
    """On a GPU nobody learns of a loss before, so nothing was restored."""
    log = []

    class Joined:
        def settle(self) -> None:
            log.append("settle")

        def lost(self, rank: int) -> bool:
            return "settle" in log and rank == 1

        def check(self, joined: Any, stream: Any) -> None:
            log.append("check")

        def restore(self, joined: Any) -> None:
            log.append("restore")

    joined: Any = Joined()
    joined.steps = joined
    made: Any = types.SimpleNamespace(size=2, device=None, all=lambda: [joined], lost=set, current=lambda: None)
    Masks(made, made).clean()
    assert log == ["settle", "check", "restore"]


def test_the_watch_ends_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looked:
        times = 0

        def look(self, stream: Any) -> None:
            assert stream is None
            self.times += 1
            raise MemoryError  # it looks again

    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda of: told.append(of.exc_type))  # no traceback, which keeps all
    joined = Looked()
    watching = Watch(joined.look, torch.device("cpu"))
    end = time.monotonic() + 60
    while joined.times < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert joined.times >= 3
    assert told == [MemoryError]
    del joined
    watching._thread.join(60)
    assert not watching._thread.is_alive()
    watching.stop()


def test_an_interrupted_operation_is_ended_first() -> None:
    """Else another one would be submitted in its place after a break."""
    written: list[str] = []
    joined: Any = FakeJoined([6])
    steps = Steps()
    one: Any = FakeStep("a", [KeyboardInterrupt(), LOST], written)
    two: Any = FakeStep("b", [LOST, 6], written)
    steps.begin(joined, one)
    with pytest.raises(KeyboardInterrupt):
        steps.end(joined, one)
    steps.begin(joined, two)
    steps.end(joined, two)
    assert ", ".join(written) == "a FIRST, a completed, b FIRST, b AGAIN, b completed"


class HostStreams:
    comm = None
    capturing = False


def begun(joined: groups.Joined, step: FakeStep) -> Any:
    """An operation with a hook, which nobody has called."""
    streams: Any = HostStreams()
    operation = low_latency._Operation(joined, streams, False, ())
    given: Any = step
    operation.begin(given, False)
    operation.later()
    return operation


def test_a_break_while_a_hook_is_made_up_for() -> None:
    """The operation is submitted again inside the wait for it."""
    written: list[str] = []
    group: Any = FakeGroup([5])
    joined = groups.Joined(group, groups.Shape(8, 256, 2, True), shrink=True)
    hooks = [begun(joined, FakeStep(*step, written)).hook for step in (("a", [LOST, 5]), ("b", [6]))]
    for hook in hooks:
        hook()
    joined.settle()
    assert ", ".join(written) == "a FIRST, a AGAIN, a completed, b FIRST, b completed"


def test_an_error_that_is_kept_keeps_nothing() -> None:
    group: Any = FakeGroup([])
    joined = groups.Joined(group, groups.Shape(8, 256, 2, True), shrink=True)

    def fails() -> tuple[Any, Any]:
        tensor = torch.zeros(1)
        operation = begun(joined, FakeStep("a", [epd.InvalidArgument("wrong")], []))
        for _ in range(2):
            try:
                operation.hook()
            except epd.InvalidArgument as error:
                assert error.text == "wrong"
            else:
                raise AssertionError("no error")
        return weakref.ref(tensor), operation

    gc.disable()
    try:
        left, _operation = fails()
        assert left() is None
    finally:
        gc.enable()


def test_rows_move() -> None:
    made = torch.Generator().manual_seed(1)
    for turn in range(20):
        experts, ranks, size, dtype = 3, 4, 16, (torch.float32, torch.uint8, torch.bfloat16)[turn % 3]
        have = torch.randint(0, 5, (experts, ranks), generator=made)
        want = torch.where(torch.rand((experts, ranks), generator=made) < 0.5, have, torch.zeros_like(have))
        if turn % 2:
            want, have = have, want
        rows = torch.randint(1, 100, (experts, size, 2), generator=made).to(dtype)
        expected = torch.zeros_like(rows)
        for expert in range(experts):
            for rank in range(ranks):
                count = min(int(have[expert, rank]), int(want[expert, rank]))
                here, there = int(have[expert, :rank].sum()), int(want[expert, :rank].sum())
                expected[expert, there : there + count] = rows[expert, here : here + count]
        assert torch.equal(places.move(rows, have, want), expected)
