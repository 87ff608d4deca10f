"""One MoE layer as a CUDA graph: captured once, replayed with other tokens and other routing each time.

    python moe_graph.py [--ranks R] [SOCKET]

Rank r runs in a process of its own on GPU r (in turn, if there are fewer), on a daemon with GPUs.
The CUDA driver is called by ctypes, so that nothing else is needed; in a program with torch, torch captures and
replays. Exit status 0: every rank found what it should.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional

import epd
import ranks

TOKENS, HIDDEN, EXPERTS_PER_RANK, REPLAYS = 16, 256, 4, 5
X_BYTES, IDX_BYTES = TOKENS * HIDDEN * 2, TOKENS * 4


class Cuda:
    """The part of the driver that this example needs."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise OSError(f"{name}: CUDA error {result}")

    def use(self, gpu: int) -> int:
        """Makes the primary context of a GPU current; returns which GPU that was."""
        count, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGetCount", ctypes.byref(count))
        gpu %= count.value
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
        self("cuCtxSetCurrent", context)
        return gpu

    def stream(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(made), 1)
        return made

    def pinned(self, size: int) -> Any:
        """Memory that a graph reads and writes anew each time."""
        made = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(made), ctypes.c_size_t(size), 0)
        return (ctypes.c_ubyte * size).from_address(made.value or 0)


def address(array: epd.DeviceArray) -> ctypes.c_uint64:
    return ctypes.c_uint64(array.address)


def enqueue_layer(cuda: Cuda, group: epd.Group, stream: ctypes.c_void_p, host: list[Any]) -> list[epd.Ticket]:
    """dispatch, experts, combine; each replay makes two operations more, and the tickets stay."""
    b = group.buffers(0)
    x, topk_idx, out = host
    cuda("cuMemcpyHtoDAsync_v2", address(b.x), x, ctypes.c_size_t(X_BYTES), stream)
    cuda("cuMemcpyHtoDAsync_v2", address(b.topk_idx), topk_idx, ctypes.c_size_t(IDX_BYTES), stream)
    dispatch = group.dispatch(0, TOKENS, stream=stream.value, omit_weights=True)
    # Here a model launches its experts' kernels. These experts answer each row with the row.
    rows = group.config.num_ranks * X_BYTES
    cuda("cuMemcpyDtoDAsync_v2", address(b.y), address(b.recv_x), ctypes.c_size_t(rows), stream)
    combine = group.combine(0, dispatch.handle, stream=stream.value)
    cuda("cuMemcpyDtoHAsync_v2", out, address(b.out), ctypes.c_size_t(X_BYTES), stream)
    return [dispatch, combine]


def run_rank(rank: int, num_ranks: int, name: str, socket: Optional[str]) -> None:
    cuda = Cuda()
    gpu = cuda.use(rank)
    shape = epd.GroupConfig(
        name=name,
        rank=rank,
        num_ranks=num_ranks,
        num_experts=num_ranks * EXPERTS_PER_RANK,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=1,
        timeout_ms=30000,
    )
    with epd.attach(socket, f"cuda:{gpu}") as session, session.join(shape) as group:
        stream = cuda.stream()
        host = [cuda.pinned(X_BYTES), cuda.pinned(IDX_BYTES), cuda.pinned(X_BYTES)]
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        cuda("cuStreamBeginCapture_v2", stream, 1)
        tickets = enqueue_layer(cuda, group, stream, host)
        cuda("cuStreamEndCapture", stream, ctypes.byref(graph))
        cuda("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        x, topk_idx = memoryview(host[0]).cast("B").cast("H"), memoryview(host[1]).cast("B").cast("i")
        for step in range(REPLAYS):
            for t in range(TOKENS):
                topk_idx[t] = (t * (step + 1) + rank) % (num_ranks * EXPERTS_PER_RANK)
                for h in range(HIDDEN):
                    x[t * HIDDEN + h] = 0x3F80 + step + t + h % 16  # bf16 numbers from 1
            cuda("cuGraphLaunch", executable, stream)
            cuda("cuStreamSynchronize", stream)
            # A stream goes on also if something fails. The tickets tell, of each replay anew.
            for ticket in tickets:
                result = ticket.wait(30000)
                assert result.runs == step + 1, f"the result is of replay {result.runs - 1}"
            assert bytes(host[2]) == bytes(host[0]), f"replay {step}: what came back is not what was sent"
    print(f"rank {rank}: {REPLAYS} replays right")


if __name__ == "__main__":
    sys.exit(ranks.run("One MoE layer as a CUDA graph.", "moe-graph-py", run_rank))
