"""One rank's forward passes, in its own process."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from .. import DaemonLost, Dispatch, EngineRestarted, GroupConfig, Payload, Session, Ticket, attach
from ..numbers import from_bf16, to_bf16
from .model import Experts, Gate, Model
from .random import mix64
from .text import embed, rms_normalize

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Plan:
    """What the demo does."""

    model: Model
    passes: int
    tokens: int  # of each rank and pass, in two micro-batches
    pieces: list[bytes]  # of the text
    socket: str
    group: str

    def micro_batch(self, m: int) -> int:
        """Tokens of a micro-batch: the first takes the odd one."""
        return self.tokens - self.tokens // 2 if m == 0 else self.tokens // 2


@dataclass(frozen=True)
class Report:
    """What a rank has to say."""

    checksums: list[int]  # of the hidden states' bits, for each pass
    seconds: list[float]  # of each pass
    blocked: float  # seconds in which this process only waited
    rows: int  # received


class Rank:
    """While the rows of one micro-batch travel, this process computes on the other; each has a slot."""

    def __init__(self, plan: Plan, rank: int, gates: list[Gate]) -> None:
        model = plan.model
        self._plan, self._rank, self._gates = plan, rank, gates
        self._experts = [Experts(model, layer, rank) for layer in range(model.num_layers)]
        self._session = _attach(plan.socket, f"host:{rank}")
        self._group = self._session.join(
            GroupConfig(
                name=plan.group,
                rank=rank,
                num_ranks=model.num_ranks,
                num_experts=model.num_experts,
                max_tokens=plan.micro_batch(0),
                hidden=model.hidden,
                topk=model.topk,
                depth=2,
                payload=Payload.FP8_CAST,
            )
        )
        self._buffers = [self._group.numpy(m) for m in range(2)]
        self._states: list[Array] = []
        self._blocked = 0.0
        self._rows = 0
        self._next_line = 0.0

    def run(self) -> Report:
        """All passes."""
        checksums, seconds = [], []
        for step in range(self._plan.passes):
            self._load_text(step)
            begin = time.perf_counter()
            self._forward(step)
            seconds.append(time.perf_counter() - begin)
            checksums.append(_checksum(self._states))
        report = Report(checksums, seconds, self._blocked, self._rows)
        del self._buffers  # the arrays keep the membership
        self._session.detach()
        return report

    def _load_text(self, step: int) -> None:
        """Each pass and rank reads on in the text, and begins again at its end."""
        plan = self._plan
        place = (step * plan.model.num_ranks + self._rank) * plan.tokens
        self._states = []
        for m in range(2):
            places = range(place, place + plan.micro_batch(m))
            rows = [embed(plan.pieces, at % len(plan.pieces), plan.model.hidden) for at in places]
            self._states.append(np.array(rows, np.float32).reshape(len(rows), plan.model.hidden))
            place += len(rows)

    def _forward(self, step: int) -> None:
        combines: list[Optional[Ticket]] = [None, None]
        dispatches: list[Dispatch] = []
        for layer in range(self._plan.model.num_layers):
            self._show_progress(step, layer)
            dispatches.clear()
            for m in range(2):
                self._add_output(combines[m], m)
                dispatches.append(self._choose_experts(layer, m))
            for m, dispatch in enumerate(dispatches):
                combines[m] = self._run_experts(layer, m, dispatch)
        for m in range(2):
            self._add_output(combines[m], m)

    def _show_progress(self, step: int, layer: int) -> None:
        """Rank 0 prints at most one line a second."""
        now = time.monotonic()
        if self._rank == 0 and now >= self._next_line:
            self._next_line = now + 1
            passes, layers = self._plan.passes, self._plan.model.num_layers
            print(f"forward pass {step + 1} of {passes}, layer {layer + 1} of {layers}", file=sys.stderr)

    def _choose_experts(self, layer: int, m: int) -> Dispatch:
        """RMSNorm, then the gate on what will be sent: the values rounded to bf16."""
        buffers, tokens = self._buffers[m], self._plan.micro_batch(m)
        normed = self._states[m].copy()
        rms_normalize(normed)
        buffers.x[:tokens] = to_bf16(normed)
        idx, weights = self._gates[layer].select(from_bf16(buffers.x[:tokens]))
        buffers.topk_idx[:tokens] = idx
        buffers.topk_weights[:tokens] = weights
        return self._group.dispatch(m, tokens)

    def _run_experts(self, layer: int, m: int, dispatch: Dispatch) -> Ticket:
        rows = self._wait(dispatch)
        self._rows += rows
        b = self._buffers[m]
        assert b.recv_scales is not None
        b.y[:rows] = self._experts[layer].run(
            b.recv_x[:rows], b.recv_scales[:rows], b.recv_topk_idx[:rows], b.recv_topk_weights[:rows]
        )
        return self._group.combine(m, dispatch.handle)

    def _add_output(self, combine: Optional[Ticket], m: int) -> None:
        if combine is not None:
            self._wait(combine)
            self._states[m] += from_bf16(self._buffers[m].out[: self._plan.micro_batch(m)])

    def _wait(self, ticket: Ticket) -> int:
        begin = time.perf_counter()
        result = ticket.wait()
        self._blocked += time.perf_counter() - begin
        return result.num_recv_rows


def _attach(socket: str, device: str) -> Session:
    """Waits for a device whose engine is starting."""
    end = time.monotonic() + 10
    while True:
        try:
            return attach(socket, device)
        except (DaemonLost, EngineRestarted):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _checksum(states: list[Array]) -> int:
    """Of float32 bits, in order."""
    total = 0
    for values in states:
        for bits in values.reshape(-1).view(np.uint32).tolist():
            total = mix64(total ^ bits)
    return total
