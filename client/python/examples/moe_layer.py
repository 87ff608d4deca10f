"""A Mixture-of-Experts layer on several processes, against the same layer computed densely. Needs numpy.

    python moe_layer.py [--ranks R] [SOCKET]

Two micro-batches overlap: begin() submits a dispatch with defer_receive and returns a hook; while the rows of
one micro-batch travel, the process computes on the other; receive() waits for the arrival. Exit status 0: every
rank found what the dense layer gives.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional

import numpy as np

import epd
import ranks
from epd.numbers import from_bf16, to_bf16

TOKENS, HIDDEN, INNER, TOPK, EXPERTS_PER_RANK = 16, 256, 64, 2, 4

Array = Any  # of numpy
Receive = Callable[[], int]


class Layer:
    """One rank's part of the layer: x -> sum over the chosen experts of weight * expert(x)."""

    def __init__(self, group: epd.Group, experts: list[tuple[Array, Array]]) -> None:
        local = len(experts) // group.config.num_ranks
        self.group = group
        self.experts = experts[group.rank * local : (group.rank + 1) * local]
        self.handles: dict[int, epd.Handle] = {}

    def begin(self, slot: int, x: Array, topk_idx: Array, weights: Array) -> Receive:
        """Sends the tokens; the hook that it returns waits for what this rank receives, and gives its rows."""
        b, n = self.group.numpy(slot), len(x)
        b.x[:n], b.topk_idx[:n], b.topk_weights[:n] = x, topk_idx, weights
        ticket = self.group.dispatch(slot, n, defer_receive=True)
        self.handles[slot] = ticket.handle
        return lambda: ticket.wait().num_recv_rows

    def compute(self, slot: int, rows: int) -> epd.Ticket:
        """This rank's experts on the rows received; sends the sums back."""
        b = self.group.numpy(slot)
        x = from_bf16(b.recv_x[:rows])
        y = np.zeros((rows, HIDDEN), np.float32)
        for number, expert in enumerate(self.experts):
            row, k = np.nonzero(b.recv_topk_idx[:rows] == number)
            y[row] += b.recv_topk_weights[row, k, None] * apply(expert, x[row])
        b.y[:rows] = to_bf16(y)
        return self.group.combine(slot, self.handles[slot])


def apply(expert: tuple[Array, Array], x: Array) -> Array:
    """ReLU between two matrices."""
    return np.maximum(x @ expert[0], 0) @ expert[1]


def route(x: Array, gate: Array) -> tuple[Array, Array]:
    """The TOPK best experts of each token and their softmax weights."""
    scores = x @ gate
    idx = np.argsort(-scores, axis=1, kind="stable")[:, :TOPK].astype(np.int32)
    best = np.exp(np.take_along_axis(scores, idx, axis=1))
    return idx, (best / best.sum(axis=1, keepdims=True)).astype(np.float32)


def dense(x: Array, idx: Array, weights: Array, experts: list[tuple[Array, Array]]) -> Array:
    """The layer as one process computes it."""
    factors = [((idx == e) * weights).sum(axis=1)[:, None] for e in range(len(experts))]
    return sum(factor * apply(expert, x) for factor, expert in zip(factors, experts))


def run_rank(rank: int, num_ranks: int, name: str, socket: Optional[str]) -> None:
    random = np.random.default_rng(1)  # the same weights on all ranks
    scale = np.float32(1 / np.sqrt(HIDDEN))
    gate = random.normal(size=(HIDDEN, num_ranks * EXPERTS_PER_RANK)).astype(np.float32) * scale
    experts = [
        (
            random.normal(size=(HIDDEN, INNER)).astype(np.float32) * scale,
            random.normal(size=(INNER, HIDDEN)).astype(np.float32) * scale,
        )
        for _ in range(num_ranks * EXPERTS_PER_RANK)
    ]
    tokens = np.random.default_rng(100 + rank).normal(size=(2, TOKENS, HIDDEN)).astype(np.float32)
    batches = [to_bf16(batch) for batch in tokens]
    shape = epd.GroupConfig(
        name=name,
        rank=rank,
        num_ranks=num_ranks,
        num_experts=num_ranks * EXPERTS_PER_RANK,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
        depth=2,
        timeout_ms=30000,
    )
    with epd.attach(socket) as session, session.join(shape) as group:
        layer = Layer(group, experts)
        receive: list[Receive] = []
        routes = []
        for slot, batch in enumerate(batches):  # while batch 0 travels, batch 1 is routed
            routes.append(route(from_bf16(batch), gate))
            receive.append(layer.begin(slot, batch, *routes[slot]))
        # While batch 0 goes back, batch 1 is computed.
        combines = [layer.compute(slot, receive[slot]()) for slot in range(2)]
        for slot, batch in enumerate(batches):
            combines[slot].wait()
            expected = dense(from_bf16(batch), *routes[slot], experts)
            got = from_bf16(group.numpy(slot).out[:TOKENS])
            # y is rounded to bf16 on each rank, and so is their sum: 2^-9 of the largest value, each.
            error = np.abs(got - expected).max() / np.abs(expected).max()
            assert error < 2**-7, f"rank {rank}, batch {slot}: differs by {error}"
    print(f"rank {rank}: as the dense layer")


if __name__ == "__main__":
    sys.exit(ranks.run("A Mixture-of-Experts layer on several processes.", "moe-layer-py", run_rank))
