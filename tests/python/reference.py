"""Dispatch and combine as epd.h specifies them, slowly, in numpy."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

import epd
from epd.numbers import from_bf16, from_e4m3, to_bf16

Array = np.ndarray[Any, Any]


class Inputs(NamedTuple):
    """The inputs of a rank to a dispatch."""

    x: Array
    x_scales: Optional[Array]
    topk_idx: Array  # [n, K]
    topk_weights: Array  # [n, K]


class Row(NamedTuple):
    """A row that a rank receives."""

    place: int  # in the flat array of rows
    source: int
    token: int
    expert: int  # local; -1 if compact


def local_experts(config: epd.GroupConfig) -> int:
    return config.num_experts // config.num_ranks


def received_rows(config: epd.GroupConfig, inputs: list[Inputs], rank: int) -> tuple[list[Row], int]:
    """The rows that a rank receives, and M."""
    local = local_experts(config)
    mine = [
        np.where(i.topk_idx // local == rank, i.topk_idx % local, -1) * (i.topk_idx >= 0) - (i.topk_idx < 0)
        for i in inputs
    ]
    tokens = [(s, t) for s, idx in enumerate(mine) for t in range(len(idx))]
    if config.layout == epd.Layout.COMPACT:
        chosen = [(s, t) for s, t in tokens if (mine[s][t] >= 0).any()]
        return [Row(i, s, t, -1) for i, (s, t) in enumerate(chosen)], len(chosen)
    rows, begin, total = [], 0, 0
    block = config.max_recv_rows or config.num_ranks * config.max_tokens
    align = config.expert_alignment or 1
    for expert in range(local):
        if config.layout == epd.Layout.EXPERT:
            begin = expert * block
        of_expert = [(s, t) for s, t in tokens if (mine[s][t] == expert).any()]
        rows += [Row(begin + i, s, t, expert) for i, (s, t) in enumerate(of_expert)]
        total += len(of_expert)
        begin += -(-len(of_expert) // align) * align
    return rows, begin if config.layout == epd.Layout.PACKED else total


def cast_e4m3(values: Array, kind: epd.ScaleFormat) -> tuple[Array, Array]:
    """bf16 [H] to e4m3 [H] and scales [ceil(H/128)] float32: to nearest, ties to the even code."""
    padded = np.zeros(-(-len(values) // 128) * 128, np.float32)
    padded[: len(values)] = from_bf16(values)
    blocks = padded.reshape(-1, 128)
    amax = np.maximum(np.abs(blocks).max(axis=1), np.float32(1e-30))
    scales = amax / np.float32(448)
    inverse = np.float32(448) / amax
    if kind != epd.ScaleFormat.FLOAT32:
        exponents = np.ceil(np.log2(scales.astype(np.float64)))
        scales, inverse = np.float32(2.0**exponents), np.float32(2.0**-exponents)
    scaled = (blocks * inverse[:, None]).astype(np.float64)
    magnitudes = from_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    at = np.clip(np.searchsorted(magnitudes, np.abs(scaled)), 1, 126)
    low, high = magnitudes[at - 1], magnitudes[at]
    up = (np.abs(scaled) - low > high - np.abs(scaled)) | (
        (np.abs(scaled) - low == high - np.abs(scaled)) & (at % 2 == 0)
    )
    codes = np.where(up, at, at - 1) | np.where(np.signbit(scaled), 0x80, 0)
    return codes.astype(np.uint8).reshape(-1)[: len(values)], scales


def pack_ue8m0(scales: Array) -> Array:
    """Powers of two [ceil(H/128)] to exponent bytes, four to an int32 [ceil(H/512)]."""
    exponents = (scales.view(np.uint32) >> 23).astype(np.uint8)
    padded = np.zeros(-(-len(scales) // 4) * 4, np.uint8)
    padded[: len(scales)] = exponents
    return padded.view(np.int32)


def delivered(config: epd.GroupConfig, source: Inputs, token: int) -> tuple[Array, Optional[Array]]:
    """A row as it is delivered, and its scales."""
    if config.payload == epd.Payload.FP8_CAST:
        codes, scales = cast_e4m3(source.x[token], config.scale_format)
        return codes, pack_ue8m0(scales) if config.scale_format == epd.ScaleFormat.UE8M0 else scales
    return source.x[token], None if source.x_scales is None else source.x_scales[token]


def scales_of(config: epd.GroupConfig, b: Any, place: int) -> Array:
    """The scales of the row at a place of the flat array of rows."""
    if config.layout != epd.Layout.EXPERT:
        return b.recv_scales[place]
    block = b.recv_scales.shape[1]
    return b.recv_scales[place // block, place % block]


def check_dispatch(
    config: epd.GroupConfig, inputs: list[Inputs], rank: int, b: Any, num_recv_rows: int
) -> list[Row]:
    """Compares all that a rank received, bit for bit. Returns its rows."""
    rows, total = received_rows(config, inputs, rank)
    assert num_recv_rows == total
    local = local_experts(config)
    flat = {name: getattr(b, name).reshape(-1, getattr(b, name).shape[-1]) for name in ("recv_x", "recv_src")}
    idx = b.recv_topk_idx.reshape(-1, b.recv_topk_idx.shape[-1])
    weights = b.recv_topk_weights.reshape(-1, b.recv_topk_weights.shape[-1])
    for row in rows:
        source = inputs[row.source]
        expected, scales = delivered(config, source, row.token)
        assert flat["recv_src"][row.place].tolist() == [row.source, row.token]
        np.testing.assert_array_equal(flat["recv_x"][row.place], expected)
        if scales is not None:
            np.testing.assert_array_equal(scales_of(config, b, row.place), scales)
        chosen, given = source.topk_idx[row.token], source.topk_weights[row.token]
        if row.expert < 0:
            here = (chosen >= 0) & (chosen // local == rank)
            np.testing.assert_array_equal(idx[row.place], np.where(here, chosen % local, -1))
            np.testing.assert_array_equal(weights[row.place], np.where(here, given, 0))
        else:
            assert idx[row.place, 0] == row.expert
            assert weights[row.place, 0] == given[chosen == rank * local + row.expert].sum(dtype=np.float32)
    if config.layout == epd.Layout.COMPACT:
        offsets = np.searchsorted([row.source for row in rows], np.arange(config.num_ranks + 1))
        np.testing.assert_array_equal(b.rank_offsets, offsets)
    else:
        for expert in range(local):
            of_expert = [row for row in rows if row.expert == expert]
            assert b.expert_counts[expert] == len(of_expert)
            for source_rank in range(config.num_ranks):
                places = [row.place for row in of_expert if row.source == source_rank]
                if config.range_format == epd.RangeFormat.PACKED64:
                    first = places[0] - b.expert_offsets[expert] if places else 0
                    packed = int(b.source_ranges[expert, source_rank])
                    assert packed & 0xFFFFFFFF == len(places) and (not places or packed >> 32 == first)
                    continue
                assert b.source_ranges[expert, source_rank, 1] == len(places)
                assert not places or b.source_ranges[expert, source_rank, 0] == places[0]
    return rows


def combined(
    config: epd.GroupConfig,
    inputs: list[Inputs],
    ys: list[Array],
    rank: int,
    weighted: bool,
    biases: list[Array],
) -> Array:
    """out [n, H] as bf16 of a rank."""
    local = local_experts(config)
    mine = inputs[rank]
    out = np.zeros((len(mine.x), config.hidden), np.float32)
    for bias in biases:
        out += from_bf16(bias[: len(out)])
    for target in range(config.num_ranks):
        rows, _ = received_rows(config, inputs, target)
        y = from_bf16(ys[target]).reshape(-1, config.hidden)
        place = {(row.token, row.expert): row.place for row in rows if row.source == rank}
        for token, chosen in enumerate(mine.topk_idx):
            here = [k for k, e in enumerate(chosen) if e >= 0 and e // local == target]
            if not here:
                continue
            weights = mine.topk_weights[token]
            if config.layout == epd.Layout.COMPACT:
                total = np.float32(0)
                for k in here:
                    total += weights[k]
                value, factor = y[place[token, -1]], total if weighted else np.float32(1)
                out[token] = _multiply_add(factor, value, out[token])
            else:
                part, used = np.zeros(config.hidden, np.float32), set()
                for k in here:
                    expert = int(chosen[k] % local)
                    if not weighted and expert in used:
                        continue  # an expert that is chosen twice has one row
                    used.add(expert)
                    factor = weights[k] if weighted else np.float32(1)
                    part = _multiply_add(factor, y[place[token, expert]], part)
                out[token] += from_bf16(to_bf16(part))
    return to_bf16(out)


def _multiply_add(factor: np.float32, value: Array, to: Array) -> Array:
    """Fused: exact in float64 for numbers of few bits, then rounded once to float32."""
    return (np.float64(factor) * value.astype(np.float64) + to.astype(np.float64)).astype(np.float32)
