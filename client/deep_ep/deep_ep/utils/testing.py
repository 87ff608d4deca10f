"""Times of functions on GPUs."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Callable, Iterator, Optional, Sequence, Union

import torch


def bench(
    function: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Optional[Callable[[], Any]] = None,
) -> tuple[float, float, float]:
    """Seconds of a call by CUDA events, with the L2 cache cold before the first: average, least, most."""
    for _ in range(num_warmups):
        function()
    torch.empty(64 << 20, dtype=torch.int32, device="cuda").zero_()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_tests)]
    for begin, end in events:
        begin.record()
        function()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in events][1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    try:
        yield
    finally:
        for descriptor, place in zip(kept, (1, 2)):
            os.dup2(descriptor, place)
            os.close(descriptor)
        os.close(nowhere)


def bench_kineto(
    function: Callable[[], Any],
    kernel_names: Union[str, Sequence[str]],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: Optional[str] = None,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
) -> Any:
    """Average seconds of the kernels whose names contain `::name`, as torch.profiler saw them.

    num_kernels_per_period  a call launches so many kernels of a name: a list of averages, in order
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with _quiet(suppress_kineto_output), torch.profiler.profile(activities=activities) as profile:
        if barrier_comm_profiling:
            square = torch.randn((8192, 8192), dtype=torch.float32, device="cuda")
            square @ square
            torch.distributed.all_reduce(torch.ones(1, dtype=torch.float32, device="cuda"))
        for _ in range(num_tests):
            function()
        torch.cuda.synchronize()
    if trace_path is not None:
        profile.export_chrome_trace(trace_path)
    averages = []
    for name in names:
        events = [event for event in profile.events() if f"::{name}" in event.name]
        events.sort(key=lambda event: event.time_range.start)
        seconds = [event.time_range.elapsed_us() / 1e6 for event in events]
        if not seconds or len(seconds) % num_kernels_per_period != 0:
            expected = f"a multiple of {num_kernels_per_period}"
            raise RuntimeError(f"{len(seconds)} kernels are named ::{name}; expected: {expected}")
        periods = [seconds[i::num_kernels_per_period] for i in range(num_kernels_per_period)]
        means = [sum(each) / len(each) for each in periods]
        averages.append(means[0] if num_kernels_per_period == 1 else means)
    return averages[0] if isinstance(kernel_names, str) else averages
