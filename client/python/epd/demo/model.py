"""A Mixture-of-Experts layer of DeepSeek-V3's shape, as in client/tools/demo/model.h.

Sums are made in the order in which epd-moe-demo makes them, each product and each sum rounded to float32: the
results are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..numbers import dequantize, from_bf16, to_bf16
from .random import derive, normals, uniforms
from .text import expf

Array = np.ndarray[Any, Any]

_LANES = 16
_BLOCK = 16384  # elements


@dataclass(frozen=True)
class Model:
    """The model's sizes."""

    num_ranks: int = 4
    num_layers: int = 4
    hidden: int = 7168
    num_experts: int = 256
    topk: int = 8
    num_groups: int = 8  # of experts, in the gate
    groups_kept: int = 4
    scale: float = 2.5
    expert_rank: int = 16  # of the low-rank experts
    seed: int = 1


def multiply_transposed(a: Array, b: Array) -> Array:
    """float32 [m, n]: a [m, k] times b [n, k] transposed. 16 partial sums over k, then their sum in order."""
    m, k = a.shape
    n = b.shape[0]
    out = np.empty((m, n), np.float32)
    right = np.ascontiguousarray(b.reshape(n, k // _LANES, _LANES).transpose(1, 0, 2))
    block = max(1, _BLOCK // (n * _LANES))  # rows of a at once, so that the sums stay in a cache
    for begin in range(0, m, block):
        left = a[begin : begin + block].reshape(-1, k // _LANES, 1, _LANES).transpose(1, 0, 2, 3)
        sums = np.zeros((left.shape[1], n, _LANES), np.float32)
        products = np.empty_like(sums)
        for step in range(k // _LANES):
            np.multiply(left[step], right[step], out=products)
            np.add(sums, products, out=sums)
        out[begin : begin + block] = _in_order(sums)
    return out


def _in_order(lanes: Array) -> Array:
    """float32 [...]: the sum over the last axis of [..., 16], from the first to the last."""
    total = np.zeros(lanes.shape[:-1], np.float32)
    for lane in range(_LANES):
        total += lanes[..., lane]
    return total


def sigmoid(values: Array) -> Array:
    """float32, by the C library's expf."""
    flat = [expf(-x) for x in values.reshape(-1).tolist()]
    return np.float32(1.0) / (np.float32(1.0) + np.array(flat, np.float32).reshape(values.shape))


class Gate:
    """One layer's gate: DeepSeek-V3's expert selection ("noaux_tc")."""

    def __init__(self, model: Model, layer: int) -> None:
        seed = derive(model.seed, 0x1000 + layer)
        count = model.num_experts * model.hidden
        deviation = np.float32(1.0) / np.sqrt(np.float32(model.hidden))
        self._model = model
        self._projection = (deviation * normals(seed, count)).reshape(model.num_experts, model.hidden)
        self._bias = np.float32(0.02) * normals(seed, model.num_experts, skip=count)

    def select(self, x: Array) -> tuple[Array, Array]:
        """For float32 [n, H]: experts int32 [n, K], best first, and their weights float32 [n, K]."""
        model = self._model
        scores = sigmoid(multiply_transposed(x, self._projection))
        biased = scores + self._bias
        tokens = x.shape[0]
        grouped = biased.reshape(tokens, model.num_groups, -1)
        two = np.sort(grouped, axis=2)
        group_scores = two[:, :, -1] + two[:, :, -2] if grouped.shape[2] > 1 else two[:, :, -1]
        kept_groups = np.argsort(-group_scores, axis=1, kind="stable")[:, : model.groups_kept]
        kept = np.full(grouped.shape, -np.inf, np.float32)
        rows = np.arange(tokens)[:, None]
        kept[rows, kept_groups] = grouped[rows, kept_groups]
        idx = np.argsort(-kept.reshape(tokens, -1), axis=1, kind="stable")[:, : model.topk]
        weights = np.take_along_axis(scores, idx, axis=1)
        total = np.zeros(tokens, np.float32)
        for k in range(model.topk):
            total += weights[:, k]
        factor = np.float32(model.scale) / np.maximum(total, np.float32(1e-20))
        return idx.astype(np.int32), weights * factor[:, None]


class Experts:
    """One rank's experts of one layer: SwiGLU of low rank."""

    def __init__(self, model: Model, layer: int, rank: int) -> None:
        self._local = model.num_experts // model.num_ranks
        self._hidden, self._rank = model.hidden, model.expert_rank
        seed = derive(derive(model.seed, 0x2000 + layer), rank)
        one = np.float32(1.0)
        count = self._local * self._rank * self._hidden
        inward = uniforms(derive(seed, 0), 2 * count, one / np.sqrt(np.float32(self._hidden)))
        outward = uniforms(derive(seed, 1), count, one / np.sqrt(np.float32(self._rank)))
        self._inward = to_bf16(inward).reshape(self._local, 2 * self._rank, self._hidden)
        self._outward = to_bf16(outward).reshape(self._local, self._rank, self._hidden)

    def run(self, rows: Array, scales: Array, idx: Array, weights: Array) -> Array:
        """For received rows [M, H] e4m3, scales [M, ceil(H/128)], idx and weights [M, K]: y [M, H] bf16."""
        values = dequantize(rows, scales)
        sums = np.zeros_like(values)
        for expert in range(self._local):
            row, k = np.nonzero(idx == expert)
            if len(row) != 0:
                self._run_expert(expert, values[row], weights[row, k], row, sums)
        return to_bf16(sums)

    def _run_expert(self, expert: int, rows: Array, weights: Array, places: Array, sums: Array) -> None:
        projected = multiply_transposed(rows, from_bf16(self._inward[expert]))
        gate, up = projected[:, : self._rank], projected[:, self._rank :]
        factors = weights[:, None] * (gate * sigmoid(gate)) * up
        outward = from_bf16(self._outward[expert])
        for i, place in enumerate(places):  # a row chooses an expert once, so the order of the rows is free
            for j in range(0, self._rank, 4):
                part = factors[i, j] * outward[j]
                for at in range(j + 1, j + 4):
                    part += factors[i, at] * outward[at]
                sums[place] += part
