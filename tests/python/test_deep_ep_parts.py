"""Parts of deep_ep by themselves: which stream of a GPU waits for which, with streams that only write down what happens
to them; who gets which tokens."""

from __future__ import annotations

import contextlib
import pickle
import sys
from types import SimpleNamespace
from typing import Any, Iterator, Optional

import pytest
from conftest import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")
sys.path.append(str(ROOT / "client/deep_ep"))

from deep_ep import Buffer, events, groups, growth, streams  # noqa: E402
from deep_ep.layout import dispatch_layout, is_layout_of, note_layout  # noqa: E402
from deep_ep.turns import Turns  # noqa: E402
from deep_ep.utils import math  # noqa: E402

import epd  # noqa: E402


class Recorder:
    """torch.cuda as deep_ep sees it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.capturing: set[str] = set()
        self.caller = FakeStream(self, "caller")
        self.current: FakeStream = self.caller
        cuda = torch.cuda
        patch.setattr(cuda, "Stream", lambda device, priority: FakeStream(self, "comm"))
        patch.setattr(cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(cuda, "is_current_stream_capturing", lambda: self.current.name in self.capturing)
        patch.setattr(cuda, "stream", self.stream)
        patch.setattr(cuda, "Event", lambda: FakeEvent(self))
        patch.setattr(events, "_on_gpus", lambda: True)
        patch.setattr(streams, "_raw_stream", None)  # as in a torch without CUDA
        patch.setattr(streams, "_captures", lambda stream: stream.name in self.capturing)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log


class FakeStream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_stream(self, other: FakeStream) -> None:
        self.recorder.log.append(f"{self.name} waits for {other.name}")
        if other.name in self.recorder.capturing:
            self.recorder.capturing.add(self.name)

    def wait_event(self, event: FakeEvent) -> None:
        self.recorder.log.append(f"{self.name} waits for event of {event.of}")
        if event.of in self.recorder.capturing:
            self.recorder.capturing.add(self.name)


class FakeEvent:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.of = recorder, ""

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name
        self.recorder.log.append(f"event on {stream.name}")


def passes(last: str, following: str) -> list[str]:
    """An operation goes to another stream than the one before."""
    return [f"event on {last}", f"{following} waits for event of {last}"]


class Used(torch.Tensor):
    """A tensor that writes down on which streams it is used."""

    def record_stream(self, stream: FakeStream) -> None:
        stream.recorder.log.append(f"{self.label} on {stream.name}")


def used(label: str) -> Any:
    tensor = torch.zeros(1).as_subclass(Used)
    tensor.label = label
    return tensor


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with pytest.MonkeyPatch.context() as patch:
        yield Recorder(patch)


def call(recorder: Recorder, made: streams.Streams, **options: Any) -> tuple[list[str], str, Optional[Any]]:
    """Returns what happens, on which stream outputs are allocated, and the event."""
    running = made.call(**options)
    with running.run():
        assert recorder.current is (made.comm if options.get("async_finish") else recorder.caller)
        with running.allocate():
            allocated = recorder.current.name
    assert recorder.current is recorder.caller
    event = running.end([used("input"), None], [used("output"), None])
    return recorder.take(), allocated, event


def test_calls_on_the_own_stream(recorder: Recorder) -> None:
    made = streams.Streams(torch.device("cuda", 0))
    log, allocated, event = call(recorder, made)
    assert log == []
    assert allocated == "caller" and event.event is None

    log, allocated, event = call(recorder, made, async_finish=True)
    waits = ["comm waits for caller"]  # for what the caller has enqueued, and so for the operation before
    assert log == [*waits, "input on comm", "output on comm", "event on comm"]
    assert allocated == "caller"
    event.current_stream_wait()
    assert recorder.take() == ["caller waits for event of comm"]

    log, allocated, _ = call(recorder, made, previous_event=events.EventOverlap(events.EventHandle()))
    assert log == ["event on caller", "caller waits for event of caller", *passes("comm", "caller")]
    assert allocated == "caller"

    # After an event, memory that the caller's stream has freed later must not be taken.
    before = events.EventOverlap(events.EventHandle())
    log, allocated, _ = call(recorder, made, previous_event=before, async_finish=True)
    assert log[2:] == [*passes("caller", "comm"), "input on comm", "output on caller", "event on comm"]
    assert allocated == "comm"

    before = events.EventOverlap(events.EventHandle())
    log, allocated, _ = call(
        recorder, made, previous_event=before, async_finish=True, allocate_on_comm_stream=True
    )
    assert log[1:] == ["comm waits for event of caller", "input on comm", "output on caller", "event on comm"]
    assert allocated == "comm"
    with pytest.raises(epd.InvalidArgument, match="allocate_on_comm_stream is True"):
        made.call(None, True, True)


def test_calls_in_which_torch_has_nothing_to_do(recorder: Recorder) -> None:
    """torch's current stream stays, and everything else is as in other calls."""
    made = streams.Streams(torch.device("cuda", 0))
    running = made.call(async_finish=True)
    with running.run(torch_works=False):
        assert recorder.current is recorder.caller
        with running.allocate():
            assert recorder.current is recorder.caller
    running.end([used("input")], [used("output")])
    assert recorder.take() == ["comm waits for caller", "input on comm", "output on comm", "event on comm"]

    running = made.call(events.EventOverlap(events.EventHandle()), async_finish=True)
    with running.run(torch_works=False):
        assert recorder.current is recorder.caller
        with running.allocate():  # not where the caller's stream may have freed memory later
            assert recorder.current is made.comm
        assert recorder.current is recorder.caller
    running.end([], [used("output")])
    assert recorder.take()[1:] == ["comm waits for event of caller", "output on caller", "event on comm"]


def test_streams_are_known_by_their_addresses(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def current_stream(device: Any = None) -> FakeStream:
        asked.append(device)
        return recorder.current

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(streams, "_raw_stream", lambda index: (index, recorder.current.name))
    made = streams.Streams(torch.device("cuda", 3))
    other = FakeStream(recorder, "other")
    for stream in (recorder.caller, other, recorder.caller, other):
        recorder.current = stream
        assert made.current() is stream
    assert asked == [torch.device("cuda", 3)] * 2
    monkeypatch.setattr(streams, "_MOST_STREAMS", 2)
    for stream in (FakeStream(recorder, "third"), other):
        recorder.current = stream
        assert made.current() is stream


def test_operations_keep_their_order(recorder: Recorder) -> None:
    made = streams.Streams(torch.device("cuda", 0))
    made.order(recorder.caller)
    made.order(recorder.caller)
    assert recorder.take() == []
    other = FakeStream(recorder, "other")
    made.order(other)
    made.order(made.comm)
    made.order(recorder.caller)
    way = ["caller", "other", "comm", "caller"]
    assert recorder.take() == [entry for pair in zip(way, way[1:]) for entry in passes(*pair)]


def test_captures_do_not_wait_for_what_was_before(recorder: Recorder) -> None:
    made = streams.Streams(torch.device("cuda", 0))
    call(recorder, made, async_finish=True)  # on the own stream, before the capture
    recorder.capturing.add("caller")
    assert made.capturing
    made.order(made.current())
    assert recorder.take() == []
    # In the capture operations keep their order, and the own stream becomes part of it.
    log, _, _ = call(recorder, made, async_finish=True)
    assert log[:2] == ["comm waits for caller", "input on comm"]
    made.order(made.current())
    assert recorder.take() == passes("comm", "caller")
    # Afterwards the captured operation is nothing to wait for.
    recorder.capturing.clear()
    recorder.capturing.add("caller")  # another graph; the own stream is in none
    made.order(made.comm)
    recorder.take()
    made.order(made.current())
    assert recorder.take() == []


@pytest.mark.parametrize("choice", [8, 100])
def test_a_layout_names_a_choice_that_is_no_expert(choice: int) -> None:
    topk_idx = torch.tensor([[0, choice]])
    with pytest.raises(epd.InvalidArgument, match=rf"topk_idx\[0, 1\] is {choice}; allowed: 0 .. 7"):
        dispatch_layout(topk_idx, 8, 2)
    with pytest.raises(epd.InvalidArgument, match=r"num_experts is 8.0; allowed: a multiple of 2"):
        dispatch_layout(topk_idx[:, :1], 8.0, 2)  # type: ignore[arg-type]
    assert dispatch_layout(torch.tensor([[0, -1], [7, 1], [-5, -(1 << 40)]]), 8, 2)[0].tolist() == [2, 1]
    assert dispatch_layout(topk_idx[:0], 8, 2)[0].tolist() == [0, 0]


@pytest.mark.parametrize("value", ["x", None, 1.5, -1])
def test_numbers_that_are_none(value: Any) -> None:
    for call, name in (
        (lambda: groups._attach(value, 0), "num_nvl_bytes"),
        (lambda: groups._attach(0, value), "num_rdma_bytes"),
        (lambda: Buffer.set_num_sms(value), "new_num_sms"),
    ):
        with pytest.raises(epd.InvalidArgument, match=f"{name} is {value}; allowed: "):
            call()


def test_an_event_that_is_none(recorder: Recorder) -> None:
    with pytest.raises(epd.InvalidArgument, match=r"previous_event is a str; allowed: None, or an EventOverlap"):
        streams.Streams(torch.device("cuda", 0)).call("x")  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason=f"torch {torch.__version__} has no e4m3 (2.1 has)")
@pytest.mark.parametrize("hidden", [8, 64, 512, 2880, 7168])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_cast_to_fp8_and_back(hidden: int, packed: bool) -> None:
    """The rows have any hidden size, with scales in columns, as the low-latency mode delivers them."""
    x = torch.randn((12, hidden), generator=torch.Generator().manual_seed(hidden)).to(torch.bfloat16)
    codes, scales = math.per_token_cast_to_fp8(x)
    assert scales.shape == (12, -(-hidden // 128))
    if packed:
        scales = 2.0 ** scales.log2().ceil()
        codes = (x.float() / scales.repeat_interleave(128, 1)[:, :hidden]).to(torch.float8_e4m3fn)
        exponents = torch.zeros((12, -(-hidden // 512) * 4), dtype=torch.uint8)
        exponents[:, : scales.shape[1]] = scales.log2() + 127
        scales = exponents.view(torch.int32)
    columns = torch.empty((scales.shape[1], 16), dtype=scales.dtype).T[:12]
    columns.copy_(scales)
    back = math.per_token_cast_back(codes, columns)
    assert back.dtype == torch.bfloat16 and math.calc_diff(back, x) < 1e-3


def test_a_gpu_of_a_container_was_named_by_its_number_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon has other numbers, and $CUDA_VISIBLE_DEVICES of UUIDs was refused."""
    uuid_of_gpu = "5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a"
    gpu = SimpleNamespace(uuid=uuid_of_gpu)
    monkeypatch.delenv("EPD_DEEPEP_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{uuid_of_gpu}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert groups._device_name() == f"GPU-{uuid_of_gpu}"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert groups._device_name() == "cuda:3"


def test_a_layout_is_of_choices_until_one_is_written_to() -> None:
    choices = torch.tensor([[0, 3]])
    in_rank = torch.ones((1, 2), dtype=torch.bool)
    assert not is_layout_of(in_rank, choices)
    note_layout(in_rank, choices)
    assert is_layout_of(in_rank, choices)
    assert not is_layout_of(in_rank, choices.clone())
    assert not is_layout_of(pickle.loads(pickle.dumps(in_rank)), choices)
    in_rank[0, 0] = False
    assert not is_layout_of(in_rank, choices)
    note_layout(in_rank, choices)
    choices[0, 0] = 1
    assert not is_layout_of(in_rank, choices)


@pytest.mark.parametrize(
    "calls, slots",
    [
        ("A a A a", "0 1 0 1"),  # dispatch and combine of batch A, then the same again
        ("A a a A a", "0 1 0 0 1"),
        ("A B a b A B a b", "0 1 0 1 0 1 0 1"),
        ("A B a A b B a b A a", "0 1 0 0 1 1 0 1 0 1"),
        ("A B b a A a", "0 1 1 0 0 1"),
        ("A B C b c A a", "0 1 0 1 0 0 1"),  # nobody wants A, so C takes its slot
        ("A B b B b a A a", "0 1 1 1 1 0 0 1"),
    ],
)
def test_slots(calls: str, slots: str) -> None:
    """Without open dispatches the next one is in slot 0, however many there were."""
    turns, of_batch, taken = Turns(), {}, []
    for batch in calls.split():
        if batch.isupper():
            turn = of_batch[batch] = turns.next()
            turns.dispatched(turn)
            taken.append(turn.slot)
        else:
            turn = of_batch[batch.upper()]
            taken.append(turn.combine_slot())
            turns.combined(turn)
    assert " ".join(map(str, taken)) == slots


def test_what_a_choice_asks_for() -> None:
    """A dispatch that fails by it tells all ranks; other failures ask for nothing."""
    text = "operation 17: topk_idx[0,0] is {} on rank 3; allowed: 0 .. 255, or a negative number: no selection"

    def asked(choice: int) -> Any:
        return growth.asked_by(epd.InvalidArgument(text.format(choice)))

    handles = growth.FIRST.handles
    while handles <= growth.MOST.handles:
        for power in range(17):
            size = growth.Size(1 << power, handles)
            choice = growth.choice_for(size)
            assert 1 << 30 <= choice < (1 << 31) - 1 and asked(choice) == (17, size)
        handles *= 2
    assert growth.FIRST.for_tokens(4097).tokens == 8192 and growth.FIRST.for_tokens(3) == growth.FIRST
    too_large = growth.choice_for(growth.Size(1 << 17, 64)), growth.choice_for(growth.Size(4096, 8192))
    for choice in (*too_large, 256, 1 << 30, (1 << 30) + (13 << 8) - 1, (1 << 31) - 1, 1 << 62):
        assert asked(choice) is None, choice
    assert growth.asked_by(epd.InvalidArgument("topk_idx is 7; allowed: none")) is None
