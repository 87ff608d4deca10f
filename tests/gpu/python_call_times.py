"""How long calls of deep_ep take on GPUs, as the caller's stream sees it. Prints figures; asserts nothing about them.

    python python_call_times.py [--ranks R] [--times N] [--tokens T] [--hidden H] [--experts E] [--topk K] [--sms S]

Low-latency mode with 128 tokens: a graph for each call. Normal mode with --tokens, under a handle. Rows lie in torch's
own memory, or (zero_copy) where the Buffer wants them. A call's time is that between two events, of the slowest rank,
less that of an empty pair. Two calls before it bring the ranks together, and the GPU is kept busy until the CPU has
enqueued all. `epbench --warm-cache` measures the same operations from C. DeepEP 1.2.1's own deep_ep runs in place of
epd's (rivals.md).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Callable

import deep_ep
import torch
import torch.distributed as dist

try:
    from deep_ep.utils.envs import init_dist
except ImportError:  # DeepEP 1.2.1 has it in tests/utils.py
    from utils import init_dist

FEW = 128
BUSY_CYCLES = 2_000_000  # a millisecond
NVL_BYTES = 2 << 30
Call = Callable[[], Any]


def captured(call: Call) -> tuple[Call, Any]:
    """The call as a graph, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def measure(calls: dict[str, Call], times: int, group: Any) -> dict[str, tuple[float, float]]:
    """p50 and p99 in us of calls that are made in this order, twice in a row, without those of an empty pair."""
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in (*calls, "nothing")}
    for _ in range(times):
        dist.barrier(group)
        torch.cuda._sleep(BUSY_CYCLES)
        for call in calls.values():
            call()
        for name in marks:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            calls.get(name, lambda: None)()
            pair[1].record()
            marks[name].append(pair)
        torch.cuda.synchronize()
    table = torch.tensor([[a.elapsed_time(b) * 1000 for a, b in pairs] for pairs in marks.values()], device="cuda")
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    rows = dict(zip(marks, table.tolist()))
    empty = statistics.median(rows.pop("nothing"))
    return {
        name: (statistics.median(each) - empty, sorted(each)[len(each) * 99 // 100] - empty)
        for name, each in rows.items()
    }


def show(title: str, figures: dict[str, tuple[float, float]], rank: int) -> None:
    if rank == 0:
        print(f"\n{title:60}    p50     p99  us")
        for name, (median, late) in figures.items():
            print(f"{name:60}{median:7.1f} {late:7.1f}", flush=True)


class Rows:
    """Inputs of a rank."""

    def __init__(self, tokens: int, options: argparse.Namespace, device: Any) -> None:
        self.x = torch.randn((tokens, options.hidden), dtype=torch.bfloat16, device=device)
        scores = torch.rand((tokens, options.experts), device=device)
        self.topk_idx = scores.topk(options.topk, dim=-1).indices.to(getattr(deep_ep, "topk_idx_t", torch.int64))
        self.weights = torch.rand((tokens, options.topk), dtype=torch.float32, device=device)


def low_latency(group: Any, device: Any, options: argparse.Namespace, rank: int) -> None:
    ranks, experts = group.size(), options.experts
    buffer = deep_ep.Buffer(
        group,
        0,
        deep_ep.Buffer.get_low_latency_rdma_size_hint(FEW, options.hidden, ranks, experts),
        low_latency_mode=True,
        num_qps_per_rank=experts // ranks,
        explicitly_destroy=True,
    )
    rows = Rows(FEW, options, device)
    for use_fp8 in (True, False):
        for where in ("torch's memory", "zero_copy"):

            def dispatch() -> Any:
                return buffer.low_latency_dispatch(rows.x, rows.topk_idx, FEW, options.experts, use_fp8=use_fp8)

            handle = dispatch()[2]
            y = torch.zeros_like(buffer.get_next_low_latency_combine_buffer(handle))
            out = torch.zeros_like(rows.x)

            def combine(handle: Any = handle, y: Any = y, out: Any = out) -> Any:
                its = buffer.get_next_low_latency_combine_buffer(handle) if where == "zero_copy" else y
                return buffer.low_latency_combine(
                    its, rows.topk_idx, rows.weights, handle, zero_copy=where == "zero_copy", out=out
                )

            combine()
            torch.cuda.synchronize()
            replay_dispatch, result = captured(dispatch)
            replay_combine, _ = captured(lambda: combine(result[2]))
            calls = {"low_latency_dispatch": replay_dispatch, "low_latency_combine": replay_combine}
            title = f"{FEW} tokens, {'e4m3' if use_fp8 else 'bf16'} rows, {where}"
            show(title, measure(calls, options.times, group), rank)
    buffer.destroy()


def normal(group: Any, device: Any, options: argparse.Namespace, rank: int) -> None:
    buffer = deep_ep.Buffer(group, NVL_BYTES, explicitly_destroy=True)
    rows = Rows(options.tokens, options, device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(rows.topk_idx, options.experts)
    fresh = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    fresh.update(topk_idx=rows.topk_idx, topk_weights=rows.weights)
    handle = buffer.dispatch(rows.x, **fresh)[4]
    e4m3 = rows.x.to(torch.float8_e4m3fn), torch.ones((options.tokens, options.hidden // 128), device=device)
    y = buffer.dispatch(rows.x, handle=handle)[0].clone()
    calls = {
        "dispatch, e4m3 rows, under a handle": lambda: buffer.dispatch(e4m3, handle=handle),
        "dispatch, bf16 rows, under a handle": lambda: buffer.dispatch(rows.x, handle=handle),
        "combine": lambda: buffer.combine(y, handle),
    }
    show(f"{options.tokens} tokens", measure(calls, options.times, group), rank)
    buffer.destroy()


def run(rank: int, size: int, options: argparse.Namespace) -> None:
    rank, size, group = init_dist(rank, size)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(rank)
    if options.sms:
        deep_ep.Buffer.set_num_sms(options.sms)
    low_latency(group, device, options, rank)
    normal(group, device, options, rank)
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--sms", type=int, help="of normal mode [as Buffer.num_sms]")
    options = parser.parse_args()
    torch.multiprocessing.spawn(run, args=(options.ranks, options), nprocs=options.ranks)
