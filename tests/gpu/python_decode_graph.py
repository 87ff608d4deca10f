"""Decoding through deep_ep: 4 low-latency layers in a CUDA graph, replayed 1000 times with other tokens and routing.

    python python_decode_graph.py [--ranks R] [--replays N] [--tokens T] [--hidden H]

A process for each rank, on GPUs in turn. Every output is compared with the dense layers. Each 10th time the last rank
runs its layers eagerly while the others replay: the slots fit all the same. Between replays torch's allocator is at work. Half of
the layers use receive hooks. Without GPUs everything runs eagerly, on host devices. Exit status 0: all was right.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import per_token_cast_back

LAYERS, EXPERTS_PER_RANK, TOPK = 4, 8, 4


class Layers:
    """Four layers on memory that stays; x -> sum over chosen experts of weight * factor of the expert * x."""

    def __init__(self, buffer: Any, tokens: int, hidden: int, use_fp8: bool, device: Any) -> None:
        self.buffer, self.tokens, self.use_fp8 = buffer, tokens, use_fp8
        self.num_experts = EXPERTS_PER_RANK * buffer.group_size
        made = torch.Generator(device=device).manual_seed(7)
        self.factors = 0.5 + torch.rand(
            (LAYERS, self.num_experts), generator=made, device=device, dtype=torch.float32
        )
        self.x = torch.zeros((tokens, hidden), dtype=torch.bfloat16, device=device)
        self.topk_idx = torch.zeros((LAYERS, tokens, TOPK), dtype=torch.int64, device=device)
        self.weights = torch.zeros((LAYERS, tokens, TOPK), dtype=torch.float32, device=device)
        self.out = torch.zeros_like(self.x)

    def fill(self, seed: int) -> None:
        """Another batch, in the same memory."""
        made = torch.Generator(device=self.x.device).manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.rand(shape, generator=made, device=self.x.device, dtype=torch.float32)

        self.x.copy_(random(*self.x.shape) - 0.5)
        self.topk_idx.copy_(random(LAYERS, self.tokens, self.num_experts).topk(TOPK, dim=-1).indices)
        self.topk_idx.masked_fill_(random(LAYERS, self.tokens, TOPK) < 0.05, -1)
        self.weights.copy_(random(LAYERS, self.tokens, TOPK))

    def run(self) -> None:
        x = self.x
        for number in range(LAYERS):
            x = self._layer(number, x, hooks=number % 2 == 1)
        self.out.copy_(x)

    def dense(self) -> Any:
        x = self.x.float()
        for factors, idx, weights in zip(self.factors, self.topk_idx, self.weights):
            scale = (factors[idx.clamp(min=0)] * weights * (idx >= 0)).sum(1, keepdim=True)
            x = x * scale
        return x

    def _layer(self, number: int, x: Any, hooks: bool) -> Any:
        buffer, idx, weights = self.buffer, self.topk_idx[number], self.weights[number]
        received, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, self.tokens, self.num_experts, use_fp8=self.use_fp8, return_recv_hook=hooks
        )
        if hook is not None:
            hook()
        begin = buffer.rank * EXPERTS_PER_RANK
        factors = self.factors[number, begin : begin + EXPERTS_PER_RANK].view(-1, 1, 1)
        if self.use_fp8:
            rows, scales = received
            flat = per_token_cast_back(rows.flatten(0, 1), scales.contiguous().flatten(0, 1))
            received = flat.view(rows.shape)
        y = (received.float() * factors).to(torch.bfloat16)
        out, _, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=hooks)
        if hook is not None:
            hook()
        return out


def capture(layers: Layers) -> Any:
    """A function that replays the layers' graph; without GPUs the layers themselves."""
    if layers.x.device.type != "cuda":
        return layers.run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # joins the groups, loads the kernels
            layers.run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run()
    return graph.replay


def check(layers: Layers, replays: int, rank: int, size: int) -> float:
    """The largest relative error of all replays."""
    layers.fill(rank)
    replay = capture(layers)
    device = layers.x.device
    worst = torch.zeros((), dtype=torch.float32, device=device)
    for number in range(replays):
        layers.fill(1000 * rank + number)
        layers.out.fill_(float("nan"))
        # Garbage in memory that the allocator gives out and takes back.
        torch.full((1 + number % 7, 1 << 18), float("nan"), dtype=torch.bfloat16, device=device)
        if number % 10 == 9 and rank == size - 1:
            layers.run()
        else:
            replay()
        expected = layers.dense()
        error = (layers.out.float() - expected).norm() / expected.norm()
        worst = torch.maximum(worst, error.nan_to_num(nan=1e9))
    return float(worst)


def times(layers: Layers, replays: int) -> float:
    """Microseconds of a replay, one after the other."""
    replay = capture(layers)
    dist.barrier()
    if layers.x.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(replays):
        replay()
    if layers.x.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / replays * 1e6


def run(rank: int, size: int, options: argparse.Namespace) -> None:
    rank, size, group = init_dist(rank, size)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    buffer = deep_ep.Buffer(group, low_latency_mode=True, explicitly_destroy=True)
    formats = [(False, 0.02), (True, 0.1)] if hasattr(torch, "float8_e4m3fn") else [(False, 0.02)]
    for use_fp8, allowed in formats:
        layers = Layers(buffer, options.tokens, options.hidden, use_fp8, device)
        worst = check(layers, options.replays, rank, size)
        name = "fp8" if use_fp8 else "bf16"
        print(
            f"rank {rank}: {name}: {options.replays} replays of {LAYERS} layers, largest relative error {worst:.4f}, "
            f"{times(layers, max(options.replays // 10, 1)):.1f} us a replay with experts",
            flush=True,
        )
        assert worst < allowed, "the dense layers give something else"
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    on_gpus = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=1000 if on_gpus else 20)
    parser.add_argument("--tokens", type=int, default=128 if on_gpus else 8)
    parser.add_argument("--hidden", type=int, default=7168 if on_gpus else 256)
    options = parser.parse_args()
    torch.multiprocessing.spawn(run, args=(options.ranks, options), nprocs=options.ranks)
