"""Engines that end while deep_ep with enable_shrink runs: nobody is lost, and every result is right.

    python python_engines_die.py [--how kill|restart] [--ranks R] [--times N] [--tokens T] [--hidden H]

A process for each rank. The ranks also wait for each other elsewhere than in the Buffer's calls: behind a combine, and
on host devices between a dispatch and its hook, in a collective of the CPU or (a GPU for each) of the current stream. $EPD_BIN has
epctl, which tells the engines. Under MPS only --how restart will do: an engine that is killed from outside takes the
clients of its GPU along. Exit status 0: all was right.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import time
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from deep_ep.shrink import Steps

EXPERTS_PER_RANK, TOPK = 8, 4
WAIT_S = 60
PORT = 8362


def epctl(*arguments: str) -> bytes:
    command = [str(pathlib.Path(os.environ["EPD_BIN"], "epctl")), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def engines() -> dict[str, int]:
    """The engine of each device, of those that have one."""
    devices = json.loads(epctl("devices", "--json"))["devices"]
    return {each["name"]: each["engine_pid"] for each in devices if each.get("engine_pid", 0)}


def end_engines(how: str, times: int) -> None:
    """One after the other, each when the one before is back."""
    devices = sorted(engines())
    for number in range(times):
        time.sleep(0.2 + 0.37 * (number % 4))
        device = devices[number % len(devices)]
        before = engines()[device]
        if how == "kill":
            os.kill(before, signal.SIGKILL)
        else:
            epctl("restart", "device", device)
        end = time.monotonic() + WAIT_S
        while engines().get(device, before) == before:
            assert time.monotonic() < end, f"the engine of {device} does not come back"
            time.sleep(0.05)


class Elsewhere:
    """Collectives that every rank waits in."""

    def __init__(self, device: Any) -> None:
        self.cpu = dist.new_group(backend="gloo")
        own = torch.cuda.device_count() >= dist.get_world_size()
        self.stream = dist.new_group(backend="nccl") if own else self.cpu
        self.word = torch.zeros(1, dtype=torch.float32, device=device if own else "cpu")
        self.number = 0

    def wait(self) -> None:
        self.number += 1
        if self.number % 2:
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=self.cpu)
        else:
            dist.all_reduce(self.word, group=self.stream)

    def any(self, value: bool) -> bool:
        word = torch.tensor([float(value)], dtype=torch.float32, device="cpu")
        dist.all_reduce(word, group=self.cpu)
        return bool(word.item())


class Recoveries:
    """Counts the breaks that this rank has taken notice of."""

    def __init__(self) -> None:
        self.count = 0
        advance = Steps._advance

        def counted(steps: Steps, joined: Any) -> bool:
            undone = advance(steps, joined)
            self.count += undone
            return undone

        Steps._advance = counted  # type: ignore[method-assign]


def capture(x: Any) -> None:
    """Captures a graph for so long that the Buffer's thread looks meanwhile; the graph is right."""
    graph = torch.cuda.CUDAGraph()
    y = torch.empty_like(x)
    with torch.cuda.graph(graph):
        torch.add(x, x, out=y)
        time.sleep(0.25)
    y.zero_()
    graph.replay()
    assert torch.equal(y, x + x)


def check(buffer: Any, device: Any, options: argparse.Namespace) -> int:
    """The rounds that were right: all of them."""
    num_experts = EXPERTS_PER_RANK * buffer.group_size
    made = torch.Generator(device="cpu").manual_seed(buffer.rank)
    shape = (options.tokens, TOPK)
    x = torch.randint(-8, 9, (options.tokens, options.hidden), generator=made, device="cpu").to(device, torch.bfloat16)
    order = torch.rand((options.tokens, num_experts), generator=made, dtype=torch.float32, device="cpu")
    idx = order.topk(TOPK, dim=1).indices.to(device)
    weights = (2.0 ** torch.randint(-1, 2, shape, generator=made, device="cpu")).to(device, torch.float32)
    expected = (x.float() * weights.sum(1, keepdim=True)).to(torch.bfloat16)
    elsewhere = Elsewhere(device)
    killer: Any = None
    rounds = 0
    while True:
        rows, _, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, options.tokens, num_experts, use_fp8=False, return_recv_hook=rounds % 3 != 2,
            async_finish=rounds % 3 == 2,
        )
        if rounds % 3 == 1 and device.type == "cpu":
            elsewhere.wait()
        if hook is not None:
            hook()
        else:
            event.current_stream_wait()
        out, _, _ = buffer.low_latency_combine(rows.clone(), idx, weights, handle)
        assert torch.equal(out, expected), f"round {rounds}"
        rounds += 1
        if rounds == 20 and buffer.rank == 0:
            killer = torch.multiprocessing.get_context("spawn").Process(target=end_engines, args=(options.how, options.times))
            killer.start()
        if device.type == "cuda" and rounds % 200 == 10:
            capture(x)
        elsewhere.wait()
        if elsewhere.any(killer is not None and not killer.is_alive()):
            break
    assert killer is None or killer.exitcode == 0
    mask = torch.zeros(buffer.group_size, dtype=torch.int32, device=device)
    buffer.low_latency_query_mask_buffer(mask)
    assert not mask.any(), f"lost: {mask.tolist()}"
    return rounds


def run(rank: int, size: int, options: argparse.Namespace) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", world_size=size, rank=rank)
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
    recoveries = Recoveries()
    rounds = check(buffer, device, options)
    assert recoveries.count > 0
    print(f"rank {rank}: {options.times} engines ended ({options.how}) within {rounds} rounds, {recoveries.count} breaks; all right", flush=True)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--how", choices=("kill", "restart"), default="kill")
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    torch.multiprocessing.spawn(run, args=(options.ranks, options), nprocs=options.ranks)
