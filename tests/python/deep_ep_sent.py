"""Inputs of the ranks in the deep_ep tests. Every rank can compute what all send, and so what it should get."""

from __future__ import annotations

from typing import Any, NamedTuple

import deep_ep
import numpy as np
import reference
import torch

import epd
from epd.torch import E4M3

BF16 = torch.bfloat16


class Sent(NamedTuple):
    """The inputs of a rank."""

    x: Any  # [n, H] bf16
    rows: Any  # x, or (e4m3, scales)
    topk_idx: Any
    topk_weights: Any


def raises(kind: type[BaseException], text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), f"{error} has no {text!r}"
    else:
        raise AssertionError(f"no {kind.__name__} of {text!r}")


def make_buffer(group: Any, **options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(group, explicitly_destroy=True, **options)


E, K, H, N = 8, 3, 264, 12
BLOCKS = -(-H // 128)  # with a scale each; the last one is shorter


def sent_by(rank: int, form: str, seed: int = 0) -> Sent:
    made = torch.Generator().manual_seed(seed * 1000 + rank)
    n = 0 if rank == 3 else N - rank
    x = torch.randint(-64, 65, (n, H), generator=made).to(BF16)
    idx = torch.randint(-1, E, (n, K), generator=made, dtype=torch.int64)
    weights = torch.randint(1, 17, (n, K), generator=made) / 16
    rows: Any = x
    if form != "bf16":
        scales = 2.0 ** torch.randint(-2, 3, (n, BLOCKS), generator=made).float()
        codes = torch.randint(0, 120, (n, H), generator=made).to(torch.uint8).view(E4M3)
        if form == "fp8":
            rows = (codes, scales.T.contiguous().T)  # column-major
        else:
            exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
            packed = torch.zeros((n, 4), dtype=torch.uint8)
            packed[:, :BLOCKS] = exponents
            rows = (codes, packed.view(torch.int32))
    return Sent(x, rows, idx, weights)


def received_by(rank: int, size: int, all_sent: list[Sent]) -> list[tuple[int, int]]:
    """(source, token) of each row, in order."""
    local = E // size
    return [
        (source, token)
        for source, sent in enumerate(all_sent)
        for token, chosen in enumerate(sent.topk_idx.tolist())
        if any(e >= 0 and e // local == rank for e in chosen)
    ]


def check_rows(got: Any, all_sent: list[Sent], expected: list[tuple[int, int]]) -> None:
    parts = got if isinstance(got, tuple) else (got,)
    for number, part in enumerate(parts):
        for row, (source, token) in enumerate(expected):
            rows = all_sent[source].rows
            mine = (rows if isinstance(rows, tuple) else (rows,))[number][token]
            a, b = part[row].contiguous().view(torch.uint8), mine.contiguous().view(torch.uint8)
            assert torch.equal(a, b), f"row {row}: {part[row]} is not {mine}"


def dispatch_sent(buffer: deep_ep.Buffer, all_sent: list[Sent]) -> tuple[Any, Any]:
    """A normal dispatch of what this rank sends: the rows, and the handle."""
    mine = all_sent[buffer.rank]
    per_expert = buffer.get_dispatch_layout(mine.topk_idx, E)[2]
    rows, _, _, _, handle, _ = buffer.dispatch(
        mine.x, num_tokens_per_expert=per_expert, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights
    )
    return rows, handle


def check_choices(rank: int, size: int, got_idx: Any, got_weights: Any, all_sent: list[Sent], expected: Any) -> None:
    local = E // size
    for row, (source, token) in enumerate(expected):
        chosen, weights = all_sent[source].topk_idx[token], all_sent[source].topk_weights[token]
        here = (chosen >= 0) & (torch.div(chosen, local, rounding_mode="floor") == rank)
        assert torch.equal(got_idx[row], torch.where(here, chosen % local, torch.full_like(chosen, -1)))
        assert torch.equal(got_weights[row], torch.where(here, weights, torch.zeros_like(weights)))


LL_T = 9
FORMATS = {
    "bf16": ({"use_fp8": False}, epd.Payload.BF16, epd.ScaleFormat.FLOAT32),
    "fp8": ({"use_fp8": True}, epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32),
    "pow2": ({"round_scale": True}, epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32_POW2),
    "ue8m0": ({"round_scale": True, "use_ue8m0": True}, epd.Payload.FP8_CAST, epd.ScaleFormat.UE8M0),
}


def ll_shape(
    size: int, payload: epd.Payload, scale_format: epd.ScaleFormat, tokens: int = LL_T
) -> epd.GroupConfig:
    """For the reference."""
    return epd.GroupConfig(
        num_ranks=size,
        num_experts=E,
        max_tokens=tokens,
        hidden=H,
        topk=K,
        payload=payload,
        scale_format=scale_format,
        layout=epd.Layout.EXPERT,
    )


def ll_sent(size: int, seed: int, most: int = LL_T) -> list[Sent]:
    made = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(seed * 1000 + rank + 1)
        n = most - rank if rank != 3 else 0
        x = torch.randn((n, H), generator=generator).to(BF16)
        idx = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(n)] or [torch.zeros(K)])[:n].long()
        idx.masked_fill_(torch.rand((n, K), generator=generator) < 0.2, -1)
        made.append(Sent(x, x, idx, torch.randint(1, 9, (n, K), generator=generator) / 8))
    return made


def as_bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def as_inputs(all_sent: list[Sent]) -> list[reference.Inputs]:
    return [
        reference.Inputs(as_bits(sent.x), None, sent.topk_idx.numpy(), sent.topk_weights.numpy()) for sent in all_sent
    ]


def check_ll_dispatch(
    form: str, rank: int, size: int, all_sent: list[Sent], got: Any, counts: Any, handle: Any, most: int = LL_T
) -> None:
    _, payload, scale_format = FORMATS[form]
    config, inputs, local = ll_shape(size, payload, scale_format, most), as_inputs(all_sent), E // size
    rows, _ = reference.received_rows(config, inputs, rank)
    x, scales = got if isinstance(got, tuple) else (got, None)
    src_info, layout_range, tokens, hidden, num_experts = handle
    assert (tokens, hidden, num_experts) == (most, H, E)
    assert x.is_contiguous() and x.shape == (local, size * most, H) and src_info.shape == x.shape[:2]
    assert layout_range.dtype == torch.int64 and layout_range.shape == (local, size)
    assert counts.dtype == torch.int32 and counts.tolist() == [sum(r.expert == e for r in rows) for e in range(local)]
    if scales is not None:
        columns = {"ue8m0": 1}.get(form, BLOCKS)
        assert scales.shape == (local, size * most, columns)
        assert scales.stride()[1] == 1 and scales.stride()[2] == (size * most + 3) // 4 * 4
    codes = as_bits(x) if form == "bf16" else x.view(torch.uint8).numpy()
    for expert in range(local):
        mine = [row for row in rows if row.expert == expert]
        ranges = [(int(v) >> 32, int(v) & 0xFFFFFFFF) for v in layout_range[expert]]
        for source, (begin, count) in enumerate(ranges):
            of_source = [row for row in mine if row.source == source]
            assert count == len(of_source)
            for place, row in enumerate(of_source, begin):
                wanted, wanted_scales = reference.delivered(config, inputs[source], row.token)
                assert int(src_info[expert, place]) == row.token
                np.testing.assert_array_equal(codes[expert, place], wanted)
                if scales is not None:
                    np.testing.assert_array_equal(scales[expert, place].numpy(), wanted_scales)


def ll_answer(rank: int, size: int, seed: int, most: int = LL_T) -> Any:
    made = torch.Generator().manual_seed(9000 + 10 * seed + rank)
    return torch.randint(-64, 65, (E // size, size * most, H), generator=made).to(BF16)


def check_ll_combine(
    rank: int, size: int, all_sent: list[Sent], seed: int, out: Any, most: int = LL_T
) -> None:
    config = ll_shape(size, epd.Payload.BF16, epd.ScaleFormat.FLOAT32, most)
    ys = [as_bits(ll_answer(each, size, seed, most)) for each in range(size)]
    expected = reference.combined(config, as_inputs(all_sent), ys, rank, True, [])
    np.testing.assert_array_equal(as_bits(out), expected)
