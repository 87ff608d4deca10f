"""The CPU time of calls of deep_ep, and what it is made of. Prints figures; asserts nothing about them.

    python python_call_cost.py [--ranks R] [--calls N] [--tokens T] [--hidden H] [--profile]

A process for each rank with few rows, and a dozen calls in flight. "us" is the CPU time of the calling thread
(CLOCK_THREAD_CPUTIME_ID), median, and "tenth" what one call in ten takes less than. On host devices a call waits for
its operation, and copies scales and rows itself. "default device" is a second run after
torch.set_default_device("cuda"), as DeepEP's own tests do: torch then calls Python for each of its functions. "Python
and torch alone" is one call after the other in a loop, with nothing in place of the operation. --profile: also
cProfile's 40 dearest functions of each call.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import os
import pstats
import statistics
import time
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from deep_ep.utils.envs import init_dist

EXPERTS_PER_RANK, TOPK = 8, 4
ON_GPUS = torch.cuda.is_available()
clock = time.thread_time_ns


class Meter:
    """CPU times of calls by name, in ns."""

    def __init__(self, profile: bool = False) -> None:
        self.times: dict[str, list[int]] = {}
        self.profiles: dict[str, cProfile.Profile] = {}
        self.profile = profile

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.profile:
            profile = self.profiles.setdefault(name, cProfile.Profile())
            return profile.runcall(function, *arguments, **options)
        begin = clock()
        result = function(*arguments, **options)
        end = clock()
        self.times.setdefault(name, []).append(end - begin)
        return result

    def us(self, name: str) -> tuple[float, float]:
        """Median and lowest tenth, without what reading the clock takes."""
        times = self.times[name]
        empty = statistics.median(self.times["nothing"])
        return (statistics.median(times) - empty) / 1000, (sorted(times)[len(times) // 10] - empty) / 1000


def nothing(*_: Any, **__: Any) -> None:
    pass


class Calls:
    """Calls of one Buffer, in the order that all ranks make them in."""

    def __init__(self, group: Any, device: Any, options: argparse.Namespace) -> None:
        import deep_ep

        self.buffer = deep_ep.Buffer(group, low_latency_mode=True, explicitly_destroy=True)
        self.tokens, self.num_experts = options.tokens, EXPERTS_PER_RANK * self.buffer.group_size
        shape = (self.tokens, TOPK)
        self.x = torch.ones((self.tokens, options.hidden), dtype=torch.bfloat16, device=device)
        numbers = torch.arange(self.tokens * TOPK, dtype=torch.int64, device=device)
        self.topk_idx = (numbers % self.num_experts).view(shape)
        self.weights = torch.ones(shape, dtype=torch.float32, device=device)
        self.handle: Any = None

    def low_latency(self, meter: Meter) -> None:
        for use_fp8 in (False, True):
            name = "low_latency_dispatch, fp8" if use_fp8 else "low_latency_dispatch"
            for way in ("", "return_recv_hook", "async_finish"):
                given = {way: True} if way else {}
                label = f", {way}" if way else ""
                _, _, handle, event, hook = meter.call(
                    name + label,
                    self.buffer.low_latency_dispatch,
                    self.x,
                    self.topk_idx,
                    self.tokens,
                    self.num_experts,
                    use_fp8=use_fp8,
                    **given,
                )
                self.finish(meter, hook, event, way, "its hook, fp8" if use_fp8 else "its hook")
                if use_fp8:
                    y = self.buffer.get_next_low_latency_combine_buffer(handle)
                    given["zero_copy"] = True
                    label = f"{label}, zero_copy"
                else:
                    y = torch.empty_like(self.buffer.get_next_low_latency_combine_buffer(handle))
                _, event, hook = meter.call(
                    f"low_latency_combine{label}",
                    self.buffer.low_latency_combine,
                    y,
                    self.topk_idx,
                    self.weights,
                    handle,
                    **given,
                )
                self.finish(meter, hook, event, way, "hook of a combine")

    def finish(self, meter: Meter, hook: Any, event: Any, way: str, hook_name: str) -> None:
        if hook is not None:
            meter.call(hook_name, hook)
        if way == "async_finish":
            meter.call("event.current_stream_wait", event.current_stream_wait)

    def normal(self, meter: Meter) -> None:
        buffer = self.buffer
        for way in ("", "async_finish"):
            label = f", {way}" if way else ""
            given: dict[str, Any] = {way: True} if way else {}
            layout = meter.call(
                f"get_dispatch_layout{label}", buffer.get_dispatch_layout, self.topk_idx, self.num_experts, **given
            )
            per_rank, _, per_expert, in_rank, event = layout
            self.finish(meter, None, event, way, "")
            fresh = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, **given}
            fresh.update(is_token_in_rank=in_rank, topk_idx=self.topk_idx, topk_weights=self.weights)
            result = meter.call(f"dispatch{label}", buffer.dispatch, self.x, **fresh)
            self.finish(meter, None, result[-1], way, "")
            rows, handle = result[0], result[4]
            again = meter.call(f"dispatch, handle{label}", buffer.dispatch, self.x, handle=handle, **given)
            self.finish(meter, None, again[-1], way, "")
            sums = meter.call(f"combine{label}", buffer.combine, rows, handle, **given)
            self.finish(meter, None, sums[-1], way, "")


def settle() -> None:
    """No call is in flight afterwards."""
    if ON_GPUS:
        torch.cuda.synchronize()


class NoTicket:
    """Stands for a ticket where there is no operation."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def wait(self) -> None:
        pass

    def wait_on_stream(self, stream: Any) -> None:
        pass


@contextlib.contextmanager
def no_operations(handle: Any) -> Iterator[None]:
    """Groups submit nothing."""
    import epd

    ticket = NoTicket(handle)

    def submit(group: Any, slot: int, *arguments: Any, **options: Any) -> Any:
        return ticket

    dispatch, combine = epd.Group.dispatch, epd.Group.combine
    epd.Group.dispatch = epd.Group.combine = submit  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        epd.Group.dispatch, epd.Group.combine = dispatch, combine  # type: ignore[method-assign]


def python_part(calls: Calls, repeat: int) -> dict[str, float]:
    """CPU time of calls without the operation, in us."""
    buffer, x, idx, weights = calls.buffer, calls.x, calls.topk_idx, calls.weights
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, calls.num_experts)
    fresh = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    fresh.update(topk_idx=idx, topk_weights=weights)
    rows, _, _, _, normal, _ = buffer.dispatch(x, **fresh)
    sent = (x, idx, calls.tokens, calls.num_experts)
    handle = buffer.low_latency_dispatch(*sent, use_fp8=False)[2]
    y = torch.empty_like(buffer.get_next_low_latency_combine_buffer(handle))
    buffer.low_latency_combine(y, idx, weights, handle)
    for _ in range(4):
        buffer.low_latency_dispatch(*sent)
    made: dict[str, Callable[[], object]] = {"nothing": nothing}
    for way in ("", ", return_recv_hook", ", async_finish"):
        given = {way[2:]: True} if way else {}

        def dispatch(given: Any = given, use_fp8: bool = False) -> None:
            hook = buffer.low_latency_dispatch(*sent, use_fp8=use_fp8, **given)[4]
            if hook is not None:
                hook()

        def combine(given: Any = given) -> None:
            hook = buffer.low_latency_combine(y, idx, weights, handle, **given)[2]
            if hook is not None:
                hook()

        made[f"low_latency_dispatch{way}"] = dispatch
        made[f"low_latency_dispatch, fp8{way}"] = lambda dispatch=dispatch, given=given: dispatch(given, True)
        made[f"low_latency_combine{way}"] = combine
    for way in ("", ", async_finish"):
        given = {"async_finish": True} if way else {}
        made[f"dispatch, handle{way}"] = lambda given=given: buffer.dispatch(x, handle=normal, **given)
        made[f"combine{way}"] = lambda given=given: buffer.combine(rows, normal, **given)
    with no_operations(handle.routing.handle):
        return measure_primitives(made, repeat)


def primitives(buffer: Any, x: Any) -> dict[str, Callable[[], object]]:
    """The parts that calls are made of, and the same calls of the package epd."""
    import deep_ep

    device, shape, strides = x.device, tuple(x.shape), x.stride()
    sources = torch.zeros((8, 8, 2), dtype=torch.int32, device=device)
    made: dict[str, Callable[[], object]] = {
        "nothing": nothing,
        "torch.empty": lambda: torch.empty(shape, dtype=torch.bfloat16, device=device),
        "torch.empty_like": lambda: torch.empty_like(x),
        "x.new_empty": lambda: x.new_empty(shape),
        "x.view(shape)": lambda: x.view(shape),
        "x.view(dtype)": lambda: x.view(torch.int16),
        "x.narrow": lambda: x.narrow(0, 0, 1),
        "x.as_strided": lambda: x.as_strided(shape, strides),
        "x[:n]": lambda: x[:1],
        "x[..., 1]": lambda: sources[..., 1],
        "x.detach": x.detach,
        "x.copy_": lambda: x[:1].copy_(x[1:2]),
        "x.contiguous": x.contiguous,
        "x.is_contiguous": x.is_contiguous,
        "x.data_ptr": x.data_ptr,
        "x.shape": lambda: x.shape,
        "x.dtype": lambda: x.dtype,
        "x.device == device": lambda: x.device == device,
        "Buffer.capture": deep_ep.Buffer.capture,
    }
    if ON_GPUS:
        made.update(stream_primitives(x))
    return made


def stream_primitives(x: Any) -> dict[str, Callable[[], object]]:
    device = x.device
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    event = torch.cuda.Event()
    event.record(here)

    def in_stream() -> None:
        with torch.cuda.stream(other):
            pass

    return {
        "torch.cuda.current_stream()": torch.cuda.current_stream,
        "torch.cuda.current_stream(device)": lambda: torch.cuda.current_stream(device),
        "_cuda_getCurrentRawStream": lambda: torch._C._cuda_getCurrentRawStream(device.index),
        "stream.cuda_stream": lambda: here.cuda_stream,
        "stream == stream": lambda: here == other,
        "is_current_stream_capturing": torch.cuda.is_current_stream_capturing,
        "torch.cuda.Event()": torch.cuda.Event,
        "Event().record(stream)": lambda: torch.cuda.Event().record(here),
        "event.record(stream)": lambda: event.record(here),
        "stream.wait_event(event)": lambda: other.wait_event(event),
        "stream.wait_stream(stream)": lambda: other.wait_stream(here),
        "x.record_stream": lambda: x.record_stream(other),
        "with torch.cuda.stream": in_stream,
        "torch.cuda.set_stream": lambda: torch.cuda.set_stream(here),
    }


def measure_primitives(made: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """CPU time of each, in us: the median of 20 loops, without the loop's own."""
    times: dict[str, float] = {}
    repeat = max(calls // 2, 1)
    for name, function in made.items():
        loops = []
        for _ in range(20):
            begin = clock()
            for _ in range(repeat):
                function()
            loops.append((clock() - begin) / repeat / 1000)
            settle()
        times[name] = statistics.median(loops)
    empty = times.pop("nothing")
    return {name: us - empty for name, us in times.items()}


def raw_calls(buffer: Any, group: Any, x: Any, calls: int) -> Meter:
    """Dispatch and combine of the package epd, without tokens, in the current stream."""
    import epd

    names: list[Any] = [f"call-cost-{os.getpid()}"]
    dist.broadcast_object_list(names, src=0, group=group)
    shape = epd.GroupConfig(
        name=names[0],
        rank=buffer.rank,
        num_ranks=buffer.group_size,
        num_experts=EXPERTS_PER_RANK * buffer.group_size,
        max_tokens=x.shape[0],
        hidden=x.shape[1],
        topk=TOPK,
        depth=2,
        layout=epd.Layout.EXPERT,
    )
    meter = Meter()
    device = None
    if ON_GPUS:
        from deep_ep.groups import _device_name

        device = _device_name()
    with epd.attach(device=device) as session, session.join(shape) as joined:
        stream = torch.cuda.current_stream().cuda_stream if ON_GPUS else None
        out = torch.empty_like(x)
        for number in range(calls):
            memory = meter.call("epd.Memory", epd.Memory, x=x, out=out)
            ticket = meter.call("Group.dispatch", joined.dispatch, 0, 0, stream=stream)
            meter.call("Ticket.wait", ticket.wait)
            given = {"stream": stream, "memory": memory}
            ticket = meter.call("Group.combine, memory", joined.combine, 1, ticket.handle, **given)
            ticket.wait()
            meter.call("nothing", nothing, None, None, x=None)
        dist.barrier()
        del ticket, memory
    return meter


def run_calls(run: Callable[[Meter], None], calls: int, profile: bool) -> Meter:
    meter = Meter()
    for _ in range(5):  # joins the groups, loads the kernels
        run(Meter())
    for _ in range(calls):
        meter.call("nothing", nothing, None, None, x=None)
        run(meter)
        settle()
    if profile:
        profiled = Meter(profile=True)
        for _ in range(calls):
            run(profiled)
            settle()
        meter.profiles = profiled.profiles
    return meter


def table(title: str, meters: list[Meter]) -> None:
    second = " default device   tenth" if len(meters) > 1 else ""
    print(f"\n{title:56}      us   tenth{second}")
    for name in meters[0].times:
        if name != "nothing":
            cells = "  ".join(f"{median:13.1f} {tenth:7.1f}" for median, tenth in (m.us(name) for m in meters))
            print(f"{name:52}{cells}")


def list_times(title: str, times: dict[str, float]) -> None:
    print(f"\n{title:56}      us")
    for name, us in times.items():
        print(f"{name:52}{us:13.2f}")


def print_profiles(meter: Meter) -> None:
    for name, profile in meter.profiles.items():
        if name == "nothing":
            continue
        text = io.StringIO()
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(40)
        print(f"\n==== {name}\n{text.getvalue().strip()}")


def measure(group: Any, device: Any, options: argparse.Namespace, rank: int) -> None:
    kinds = [("low-latency mode", "low_latency"), ("normal mode", "normal")]
    for title, method in kinds:
        calls = Calls(group, device, options)
        run = getattr(calls, method)
        meters = [run_calls(run, options.calls, options.profile)]
        if ON_GPUS:
            torch.set_default_device("cuda")
            meters.append(run_calls(run, options.calls, False))
            torch.set_default_device(None)
        if rank == 0:
            table(title, meters)
            print_profiles(meters[0])
        if title == kinds[-1][0]:
            raw = raw_calls(calls.buffer, group, calls.x, options.calls)
            alone = python_part(calls, options.calls)
            single = measure_primitives(primitives(calls.buffer, calls.x), options.calls)
            if rank == 0:
                table("the package epd", [raw])
                list_times("Python and torch alone", alone)
                list_times("what calls are made of", single)
        calls.buffer.destroy()


def run(rank: int, size: int, options: argparse.Namespace) -> None:
    rank, size, group = init_dist(rank, size)
    device = torch.device("cpu")
    if ON_GPUS:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    torch.set_num_threads(1)
    if rank == 0:
        print(f"torch {torch.__version__}, {options.tokens} tokens, hidden {options.hidden}, {options.calls} calls")
    measure(group, device, options, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048 if ON_GPUS else 512)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.multiprocessing.spawn(run, args=(options.ranks, options), nprocs=options.ranks)
