"""What each rank of test_deep_ep.py does. Every rank can compute what all ranks send, and so what it should get."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple, Optional

import deep_ep
import numpy as np
import reference
import torch

import epd
from epd.torch import E4M3

BF16 = torch.bfloat16


class Sent(NamedTuple):
    """What a rank sends."""

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


# ---- normal mode -----------------------------------------------------------------------------------

E, K, H, N = 8, 3, 256, 12


def sent_by(rank: int, form: str, seed: int = 0) -> Sent:
    made = torch.Generator().manual_seed(seed * 1000 + rank)
    n = 0 if rank == 3 else N - rank
    x = torch.randint(-64, 65, (n, H), generator=made).to(BF16)
    idx = torch.randint(-1, E, (n, K), generator=made, dtype=torch.int64)
    weights = torch.randint(1, 17, (n, K), generator=made) / 16
    rows: Any = x
    if form != "bf16":
        scales = 2.0 ** torch.randint(-2, 3, (n, H // 128), generator=made).float()
        codes = torch.randint(0, 120, (n, H), generator=made).to(torch.uint8).view(E4M3)
        if form == "fp8":
            rows = (codes, scales.T.contiguous().T)  # column-major
        else:
            exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
            packed = torch.zeros((n, 4), dtype=torch.uint8)
            packed[:, : H // 128] = exponents
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


def check_choices(rank: int, size: int, got_idx: Any, got_weights: Any, all_sent: list[Sent], expected: Any) -> None:
    local = E // size
    for row, (source, token) in enumerate(expected):
        chosen, weights = all_sent[source].topk_idx[token], all_sent[source].topk_weights[token]
        here = (chosen >= 0) & (torch.div(chosen, local, rounding_mode="floor") == rank)
        assert torch.equal(got_idx[row], torch.where(here, chosen % local, torch.full_like(chosen, -1)))
        assert torch.equal(got_weights[row], torch.where(here, weights, torch.zeros_like(weights)))


def layout(group: Any) -> None:
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    idx = sent_by(rank, "bf16").topk_idx
    for previous in (None, buffer.capture()):
        for async_finish in (False, True):
            per_rank, rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
                idx, E, previous_event=previous, async_finish=async_finish
            )
            if async_finish:
                event.current_stream_wait()
            assert rdma is None and in_rank.dtype == torch.bool
            assert per_rank.dtype == per_expert.dtype == torch.int32
            chosen = [[e // (E // size) for e in row if e >= 0] for row in idx.tolist()]
            assert in_rank.tolist() == [[r in row for r in range(size)] for row in chosen]
            assert per_rank.tolist() == [sum(r in row for row in chosen) for r in range(size)]
            assert per_expert.tolist() == [int((idx == e).sum()) for e in range(E)]
    raises(epd.InvalidArgument, "num_experts is 9; allowed: a multiple of", lambda: buffer.get_dispatch_layout(idx, 9))
    raises(
        epd.InvalidArgument,
        "topk_idx.dtype is torch.int32; allowed: torch.int64",
        lambda: buffer.get_dispatch_layout(idx.int(), E),
    )
    buffer.destroy()


def normal(group: Any, form: str, previous: bool, async_finish: bool) -> None:
    """Dispatch with and without top-k, worst-case tokens, cached dispatch, combine."""
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    all_sent = [sent_by(each, form) for each in range(size)]
    mine, expected = all_sent[rank], received_by(rank, size, all_sent)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, E)
    config = deep_ep.Config(24, 8, 256)
    common = {"config": config, "async_finish": async_finish}

    def call(method: Any, *arguments: Any, **keywords: Any) -> Any:
        if previous:
            keywords["previous_event"] = buffer.capture()
            keywords["allocate_on_comm_stream"] = async_finish
        *results, event = method(*arguments, **common, **keywords)
        if async_finish:
            event.current_stream_wait()
        return results

    numbers = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    choice = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}
    totals = [sum(int((sent.topk_idx == e).sum()) for sent in all_sent) for e in range(E)]
    local = E // size
    totals = totals[rank * local : rank * local + local]
    for with_topk in (True, False):
        keywords = {**numbers, **(choice if with_topk else {})}
        rows, idx, weights, counts, handle = call(buffer.dispatch, mine.rows, **keywords)
        first = rows[0] if isinstance(rows, tuple) else rows
        assert first.shape == (len(expected), H)
        assert counts == totals and all(isinstance(count, int) for count in counts)
        check_rows(rows, all_sent, expected)
        prefix = [sum(source <= i for source, _ in expected) for i in range(size)]
        assert handle[0][:, rank].tolist() == prefix and handle[0].shape == (size, size)
        handle[0][:, rank] = 99  # a copy: the handle goes on
        assert handle[3].tolist() == [token for _, token in expected]
        assert len(handle) == 6 and handle[4] is in_rank
        if with_topk:
            assert idx.dtype == torch.int64 and weights.dtype == torch.float32
            check_choices(rank, size, idx, weights, all_sent, expected)
            aligned = call(buffer.dispatch, mine.rows, **keywords, expert_alignment=8)[3]
            assert aligned == [-(-count // 8) * 8 for count in totals]
            for worst in (N * size, N * size + 5, deep_ep.config.max_tokens() * size + 3):
                many, many_idx, many_weights, none, many_handle = call(
                    buffer.dispatch, mine.rows, **keywords, num_worst_tokens=worst
                )
                assert none == [] and (many[0] if isinstance(many, tuple) else many).shape[0] == worst
                check_rows(many, all_sent, expected)
                check_choices(rank, size, many_idx, many_weights, all_sent, expected)
                assert many_idx.shape == (worst, K) and (many_idx[len(expected) :] == -1).all()
                assert many_weights.shape == (worst, K) and not many_weights[len(expected) :].any()
                again = call(buffer.dispatch, mine.rows, handle=many_handle)[0]
                check_rows(again, all_sent, expected)
                y = torch.zeros((worst, H), dtype=BF16)
                y[: len(expected)] = 1
                out, _ = call(buffer.combine, y, many_handle)
                assert torch.equal(out, in_rank.sum(1, keepdim=True).to(BF16).expand(-1, H))
        else:
            assert idx is None and weights is None
        # What was received before is still what it was.
        check_rows(rows, all_sent, expected)
        again, *nothing = call(buffer.dispatch, mine.rows, handle=handle)
        assert nothing == [None, None, None, None]
        check_rows(again, all_sent, expected)
        check_combine(buffer, call, handle, all_sent, expected, weights)
    buffer.destroy()


def answers(rank: int, count: int) -> Any:
    return torch.randint(-64, 65, (count, H), generator=torch.Generator().manual_seed(500 + rank)).to(BF16)


def check_combine(
    buffer: deep_ep.Buffer, call: Any, handle: Any, all_sent: list[Sent], expected: Any, weights: Optional[Any]
) -> None:
    """Sums in float32 by ascending rank, biases first, rounded once; weights of each column summed over ranks."""
    rank, size = buffer.rank, buffer.group_size
    n = len(all_sent[rank].x)
    biases = [torch.full((n, H), 0.25 * (1 + b)).to(BF16) for b in range(2)]
    out_of = [received_by(each, size, all_sent) for each in range(size)]
    y_of = [answers(each, len(rows)) for each, rows in enumerate(out_of)]
    for bias in (None, biases[0], tuple(biases)):
        total = torch.zeros((n, H))
        for each in (bias,) if isinstance(bias, torch.Tensor) else bias or ():
            total += each.float()
        for rows, y in zip(out_of, y_of):
            for row, (source, token) in enumerate(rows):
                if source == rank:
                    total[token] += y[row].float()
        out, out_weights = call(buffer.combine, y_of[rank], handle, bias=bias)
        assert out_weights is None and torch.equal(out, total.to(BF16))
    if weights is None:
        return
    given_of = [
        torch.rand((len(rows), K), generator=torch.Generator().manual_seed(700 + each))
        for each, rows in enumerate(out_of)
    ]
    summed = torch.zeros((n, K))
    for rows, given in zip(out_of, given_of):
        for row, (source, token) in enumerate(rows):
            if source == rank:
                summed[token] += given[row]
    _, out_weights = call(buffer.combine, y_of[rank], handle, topk_weights=given_of[rank])
    assert torch.equal(out_weights, summed), (out_weights - summed).abs().max()


def other_rows_under_a_handle(group: Any) -> None:
    """A handle of e4m3 rows serves bf16 rows and the reverse, also when other dispatches came between."""
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    by_form = {form: [sent_by(each, form) for each in range(size)] for form in ("bf16", "fp8", "ue8m0")}
    expected = received_by(rank, size, by_form["bf16"])
    layout = buffer.get_dispatch_layout(by_form["bf16"][rank].topk_idx, E)
    for with_topk in (True, False):
        for first in by_form:
            mine = by_form[first][rank]
            choice = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights} if with_topk else {}
            handle = buffer.dispatch(
                mine.rows, num_tokens_per_expert=layout[2], is_token_in_rank=layout[3], **choice
            )[4]
            for second in by_form:
                for _ in range(2):
                    rows = buffer.dispatch(by_form[second][rank].rows, handle=handle)[0]
                    check_rows(rows, by_form[second], expected)
            out = buffer.combine(torch.ones((len(expected), H), dtype=BF16), handle)[0]
            assert torch.equal(out, layout[3].sum(1, keepdim=True).to(BF16).expand(-1, H))
    idx = by_form["bf16"][rank].topk_idx.clone()
    mine = by_form["bf16"][rank]
    handle = buffer.dispatch(
        mine.x, num_tokens_per_expert=layout[2], topk_idx=idx, topk_weights=mine.topk_weights
    )[4]
    idx.add_(0)
    check_rows(buffer.dispatch(by_form["fp8"][rank].rows, handle=handle)[0], by_form["fp8"], expected)
    narrow = mine.x[:, : H // 2].contiguous()
    raises(
        epd.InvalidArgument,
        "topk_idx is written to; allowed:",
        lambda: buffer.dispatch(narrow, handle=handle),
    )
    buffer.destroy()


def many_handles(group: Any) -> None:
    """As many handles as layers x micro-batches; rank 0 forgets them at other times than the others."""
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    kept = []
    for step in range(24):
        all_sent = [sent_by(each, "bf16", step) for each in range(size)]
        mine, expected = all_sent[rank], received_by(rank, size, all_sent)
        per_expert = buffer.get_dispatch_layout(mine.topk_idx, E)[2]
        rows, _, _, _, handle, _ = buffer.dispatch(
            mine.x, num_tokens_per_expert=per_expert, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights
        )
        kept.append((handle, rows, all_sent, expected))
        if step % 6 == 5:
            for handle, rows, sent, rows_of in reversed(kept[-6:]):
                check_rows(rows, sent, rows_of)
                check_rows(buffer.dispatch(sent[rank].x, handle=handle)[0], sent, rows_of)
                out = buffer.combine(rows, handle)[0]
                assert out.shape == sent[rank].x.shape
            del handle
            del kept[: len(kept) if rank == 0 else -2]  # of 8 that may be kept
            gc.collect()
    buffer.destroy()


# ---- low-latency mode ------------------------------------------------------------------------------

LL_T = 9
FORMATS = {
    "bf16": ({"use_fp8": False}, epd.Payload.BF16, epd.ScaleFormat.FLOAT32),
    "fp8": ({"use_fp8": True}, epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32),
    "pow2": ({"round_scale": True}, epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32_POW2),
    "ue8m0": ({"round_scale": True, "use_ue8m0": True}, epd.Payload.FP8_CAST, epd.ScaleFormat.UE8M0),
}


def ll_shape(size: int, payload: epd.Payload, scale_format: epd.ScaleFormat) -> epd.GroupConfig:
    """For the reference."""
    return epd.GroupConfig(
        num_ranks=size,
        num_experts=E,
        max_tokens=LL_T,
        hidden=H,
        topk=K,
        payload=payload,
        scale_format=scale_format,
        layout=epd.Layout.EXPERT,
    )


def ll_sent(size: int, seed: int) -> list[Sent]:
    made = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(seed * 1000 + rank + 1)
        n = LL_T - rank if rank != 3 else 0
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
    form: str, rank: int, size: int, all_sent: list[Sent], got: Any, counts: Any, handle: Any
) -> None:
    _, payload, scale_format = FORMATS[form]
    config, inputs, local = ll_shape(size, payload, scale_format), as_inputs(all_sent), E // size
    rows, _ = reference.received_rows(config, inputs, rank)
    x, scales = got if isinstance(got, tuple) else (got, None)
    src_info, layout_range, tokens, hidden, num_experts = handle
    assert (tokens, hidden, num_experts) == (LL_T, H, E)
    assert x.shape == (local, size * LL_T, H) and src_info.shape == x.shape[:2]
    assert layout_range.dtype == torch.int64 and layout_range.shape == (local, size)
    assert counts.dtype == torch.int32 and counts.tolist() == [sum(r.expert == e for r in rows) for e in range(local)]
    if scales is not None:
        columns = {"ue8m0": 1}.get(form, H // 128)
        assert scales.shape == (local, size * LL_T, columns)
        assert scales.stride()[1] == 1 and scales.stride()[2] == (size * LL_T + 3) // 4 * 4
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


def ll_answer(rank: int, size: int, seed: int) -> Any:
    made = torch.Generator().manual_seed(9000 + 10 * seed + rank)
    return torch.randint(-64, 65, (E // size, size * LL_T, H), generator=made).to(BF16)


def check_ll_combine(rank: int, size: int, all_sent: list[Sent], seed: int, out: Any) -> None:
    config = ll_shape(size, epd.Payload.BF16, epd.ScaleFormat.FLOAT32)
    ys = [as_bits(ll_answer(each, size, seed)) for each in range(size)]
    expected = reference.combined(config, as_inputs(all_sent), ys, rank, True, [])
    np.testing.assert_array_equal(as_bits(out), expected)


def low_latency(group: Any, form: str, hooks: bool, async_finish: bool = False) -> None:
    buffer = make_buffer(group, low_latency_mode=True, num_rdma_bytes=1 << 20)
    rank, size = buffer.rank, buffer.group_size
    options = {**FORMATS[form][0], "return_recv_hook": hooks, "async_finish": async_finish}
    stats = torch.zeros(E // size, dtype=torch.int32)
    seen = torch.zeros_like(stats)
    for step in range(5):
        all_sent = ll_sent(size, step)
        mine = all_sent[rank]
        for _ in range(step % 2 + 1):
            got, counts, handle, event, hook = buffer.low_latency_dispatch(
                mine.x.clone(), mine.topk_idx, LL_T, E, cumulative_local_expert_recv_stats=stats, **options
            )
            assert (hook is not None) == hooks
            if hooks:
                hook()
                hook()  # once more does nothing
            if async_finish:
                event.current_stream_wait()
            seen += counts
        assert torch.equal(stats, seen)
        check_ll_dispatch(form, rank, size, all_sent, got, counts, handle)
        for zero_copy in (False, True):
            y = ll_answer(rank, size, step)
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
                y = torch.full_like(y, float("nan"))
            given_out = torch.full_like(mine.x, 7) if step % 2 else None
            out, event, hook = buffer.low_latency_combine(
                y,
                mine.topk_idx,
                mine.topk_weights,
                handle,
                zero_copy=zero_copy,
                return_recv_hook=hooks,
                async_finish=async_finish,
                out=given_out,
            )
            if hooks:
                hook()
            if async_finish:
                event.current_stream_wait()
            assert given_out is None or out is given_out
            check_ll_combine(rank, size, all_sent, step, out)
    buffer.destroy()


def two_batches(group: Any) -> None:
    """Batches A and B overlap by hooks: dispatch A, dispatch B, combine A, combine B; the results stay apart."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    for step in range(3):
        batches = [ll_sent(size, 2 * step), ll_sent(size, 2 * step + 1)]
        started = []
        for batch in batches:
            mine = batch[rank]
            started.append(
                buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E, use_fp8=False, return_recv_hook=True)
            )
        for _, _, _, _, hook in started:
            hook()
        for batch, (got, counts, handle, _, _) in zip(batches, started):
            check_ll_dispatch("bf16", rank, size, batch, got, counts, handle)
        outs = []
        for number, (batch, (_, _, handle, _, _)) in enumerate(zip(batches, started)):
            y = ll_answer(rank, size, 2 * step + number)
            mine = batch[rank]
            outs.append(
                buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, handle, return_recv_hook=True)
            )
            got, counts = started[1][:2]  # B's rows are not touched by A's combine
            check_ll_dispatch("bf16", rank, size, batches[1], got, counts, started[1][2])
        for _, _, hook in outs:
            hook()
        for number, (batch, (out, _, _)) in enumerate(zip(batches, outs)):
            check_ll_combine(rank, size, batch, 2 * step + number, out)
    buffer.destroy()


def hooks_that_are_not_called(group: Any) -> None:
    """The next operation finds room all the same."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    for step in range(4):
        all_sent = ll_sent(size, step)
        mine = all_sent[rank]
        # Other integers are the same numbers: no further group is joined.
        tokens, experts = (LL_T, E) if step % 2 == 0 else (torch.tensor(LL_T), torch.tensor(E))
        handle = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, tokens, experts, use_fp8=False, return_recv_hook=True
        )[2]
        y = ll_answer(rank, size, step)
        out, _, _ = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, handle, return_recv_hook=True
        )
        out, _, _ = buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, handle)
        check_ll_combine(rank, size, all_sent, step, out)
    buffer.destroy()


def modes_of_torch_change(group: Any) -> None:
    """The first dispatches to each slot are in inference mode, and the caller then wants gradients of the scales."""
    buffer = make_buffer(group, low_latency_mode=True)
    few = ll_sent(buffer.group_size, 0)[buffer.rank]
    for number in range(4):
        with torch.inference_mode(number < 2):
            (_, scales), *_ = buffer.low_latency_dispatch(few.x, few.topk_idx, LL_T, E, use_fp8=True)
        if number >= 2:
            scales.requires_grad_()
    buffer.low_latency_dispatch(few.x, few.topk_idx, LL_T, E, use_fp8=True)
    buffer.destroy()


def results_are_copies(group: Any) -> None:
    """$EPD_DEEPEP_VIEWS=0: results outlive any number of dispatches."""
    import os

    os.environ["EPD_DEEPEP_VIEWS"] = "0"
    try:
        buffer = make_buffer(group, low_latency_mode=True)
    finally:
        del os.environ["EPD_DEEPEP_VIEWS"]
    rank, size = buffer.rank, buffer.group_size
    kept = []
    for step in range(5):
        all_sent = ll_sent(size, step)
        mine = all_sent[rank]
        got, counts, handle, _, hook = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, LL_T, E, return_recv_hook=True
        )
        hook()
        kept.append((all_sent, got, counts, handle))
    for all_sent, got, counts, handle in kept:
        check_ll_dispatch("fp8", rank, size, all_sent, got, counts, handle)
    buffer.destroy()


def both_modes(group: Any) -> None:
    """One Buffer for both modes, as serving engines have it; ranks' choices of -1 only."""
    buffer = make_buffer(group, num_nvl_bytes=1 << 20, num_rdma_bytes=1 << 20, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    for step in range(3):
        all_sent = [sent_by(each, "bf16", step) for each in range(size)]
        mine, expected = all_sent[rank], received_by(rank, size, all_sent)
        per_expert = buffer.get_dispatch_layout(mine.topk_idx, E)[2]
        rows, _, _, _, handle, _ = buffer.dispatch(
            mine.x, num_tokens_per_expert=per_expert, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights
        )
        check_rows(rows, all_sent, expected)
        buffer.clean_low_latency_buffer(LL_T, H, E)
        few = ll_sent(size, step)[rank]
        nobody = torch.full_like(few.topk_idx, -1)
        got, counts, ll_handle, _, _ = buffer.low_latency_dispatch(few.x, nobody, LL_T, E)
        assert not counts.any() and not ll_handle[1].any()
        y = torch.full((E // size, size * LL_T, H), float("nan")).to(BF16)
        out, _, _ = buffer.low_latency_combine(y, nobody, few.topk_weights, ll_handle)
        assert not out.any()
        assert buffer.combine(rows, handle)[0].shape == mine.x.shape
    mask = torch.full((size,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    assert not mask.any()
    buffer.low_latency_clean_mask_buffer()
    assert buffer.get_local_buffer_tensor(BF16, use_rdma_buffer=True).zero_().numel() == 1 << 19
    assert buffer.get_local_buffer_tensor(BF16, torch.Size([3, 4])).shape == (3, 4)
    assert buffer.get_comm_stream() is None
    buffer.destroy()


# ---- the Buffer ------------------------------------------------------------------------------------


def buffers_end_in_any_order(group: Any) -> None:
    """Several Buffers at one time, views that outlive them, collection in place of destroy."""
    buffers = [make_buffer(group, low_latency_mode=True) for _ in range(3)]
    rank, size = buffers[0].rank, buffers[0].group_size
    all_sent = ll_sent(size, 1)
    mine = all_sent[rank]
    started = [buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E, use_fp8=False) for buffer in buffers]
    buffers[1].destroy()
    for buffer, (got, counts, handle, _, _) in zip(buffers, started):
        check_ll_dispatch("bf16", rank, size, all_sent, got, counts, handle)
    raises(
        epd.InvalidArgument,
        "the Buffer is destroyed",
        lambda: buffers[1].low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E),
    )
    raises(epd.InvalidArgument, "the Buffer is destroyed", buffers[1].destroy)
    got, counts, handle, _, _ = started.pop(0)
    buffers.pop(0).destroy()
    del buffer, started
    check_ll_dispatch("bf16", rank, size, all_sent, got, counts, handle)
    out, _, _ = buffers[1].low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E)[2:5]
    torch.distributed.barrier(group)
    buffers.clear()
    gc.collect()
    del got, counts, handle, out
    gc.collect()
    torch.distributed.barrier(group)
    unspoken = deep_ep.Buffer(group)
    raises(epd.InvalidArgument, "explicitly_destroy is False; allowed: True for destroy()", unspoken.destroy)
    torch.distributed.barrier(group)
    del unspoken
    gc.collect()


def memberships_end_with_the_buffer(group: Any) -> None:
    """A Buffer keeps views of its slots, but not beyond its end."""
    buffer = make_buffer(group, low_latency_mode=True)
    mine = ll_sent(buffer.group_size, 0)[buffer.rank]
    for _ in range(2):
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E)
    joined = buffer._groups.all()[0]
    assert len(joined.results) == 2
    buffer.destroy()
    assert joined.group.leave(), "something keeps the membership"


def wrong_arguments(group: Any) -> None:
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    mine = sent_by(0, "bf16")
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, E)
    numbers = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    choice = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}
    rows, _, _, _, handle, event = buffer.dispatch(mine.x, **numbers, **choice)
    raises(RuntimeError, "the call has no event", event.current_stream_wait)
    few = ll_sent(size, 0)[0]
    ll_handle = buffer.low_latency_dispatch(few.x, few.topk_idx, LL_T, E)[2]
    y = torch.zeros((E // size, size * LL_T, H), dtype=BF16)
    ll = (few.topk_idx, few.topk_weights, ll_handle)
    refused = [
        ("x.dtype is torch.float32; allowed: torch.bfloat16", lambda: buffer.dispatch(mine.x.float(), **numbers)),
        ("x is a int; allowed: a tensor", lambda: buffer.dispatch(3, **numbers)),
        ("x[1].shape is", lambda: buffer.dispatch((mine.x.to(torch.uint8).view(E4M3), mine.x.float()), **numbers)),
        ("num_tokens_per_expert is None", lambda: buffer.dispatch(mine.x, **choice)),
        ("topk_weights is None", lambda: buffer.dispatch(mine.x, **numbers, topk_idx=mine.topk_idx)),
        ("topk_idx is None", lambda: buffer.dispatch(mine.x, **numbers, topk_weights=mine.topk_weights)),
        ("is_token_in_rank is a NoneType", lambda: buffer.dispatch(mine.x, num_tokens_per_expert=per_expert)),
        ("expert_alignment is 0", lambda: buffer.dispatch(mine.x, **numbers, expert_alignment=0)),
        ("allowed: None under a handle", lambda: buffer.dispatch(mine.x, handle=handle, **choice)),
        (f"x.shape[0] is 3; allowed: {N}", lambda: buffer.dispatch(mine.x[:3], handle=handle)),
        ("handle is a tuple; allowed: a NormalHandle", lambda: buffer.dispatch(mine.x, handle=(1, 2))),
        ("config is a str; allowed: None, or a Config", lambda: buffer.dispatch(mine.x, handle=handle, config="x")),
        ("config is a int; allowed: None, or a Config", lambda: buffer.combine(rows, handle, config=0)),
        (
            "previous_event is a str; allowed: None, or an EventOverlap",
            lambda: buffer.combine(rows, handle, previous_event="x"),
        ),
        ("handle is a LowLatencyHandle", lambda: buffer.combine(rows, ll_handle)),
        (f"x.shape is [{len(rows) + 1}, {H}]", lambda: buffer.combine(torch.zeros(len(rows) + 1, H).to(BF16), handle)),
        ("bias is 3 tensors; allowed: at most 2", lambda: buffer.combine(rows, handle, bias=(mine.x,) * 3)),
        ("bias[0].shape is [1,", lambda: buffer.combine(rows, handle, bias=mine.x[:1])),
        (
            "allocate_on_comm_stream is True",
            lambda: buffer.dispatch(mine.x, **numbers, **choice, allocate_on_comm_stream=True),
        ),
        (f"x.shape[0] is {LL_T}; allowed: 0 .. 4", lambda: buffer.low_latency_dispatch(few.x, few.topk_idx, 4, E)),
        (f"num_experts is {E}.0", lambda: buffer.low_latency_dispatch(few.x, few.topk_idx, LL_T, float(E))),
        ("num_experts is True", lambda: buffer.low_latency_dispatch(few.x, few.topk_idx, LL_T, True)),
        (
            "topk_idx.dtype is torch.int32; allowed: torch.int64",
            lambda: buffer.low_latency_dispatch(few.x, few.topk_idx.int(), LL_T, E),
        ),
        (
            f"topk_idx.shape is [{len(few.x) - 1}, {K}]; allowed: [{len(few.x)}, any]",
            lambda: buffer.low_latency_dispatch(few.x, few.topk_idx[1:], LL_T, E),
        ),
        ("x is a ndarray", lambda: buffer.low_latency_dispatch(few.x.float().numpy(), few.topk_idx, LL_T, E)),
        (
            "topk_idx is a list",
            lambda: buffer.low_latency_dispatch(few.x, few.topk_idx.tolist(), LL_T, E),
        ),
        (
            "round_scale is False; allowed: True with use_ue8m0",
            lambda: buffer.low_latency_dispatch(few.x, few.topk_idx, LL_T, E, use_ue8m0=True),
        ),
        (
            "async_finish and return_recv_hook is both True",
            lambda: buffer.low_latency_dispatch(
                few.x, few.topk_idx, LL_T, E, async_finish=True, return_recv_hook=True
            ),
        ),
        ("x.shape is", lambda: buffer.low_latency_combine(y[:, :5], *ll)),
        (
            "out.stride() is (1, ",
            lambda: buffer.low_latency_combine(y, *ll, out=torch.zeros((H, len(few.x)), dtype=BF16).t()),
        ),
        ("x is a tuple of 3", lambda: buffer.dispatch((mine.x,) * 3, **numbers, **choice)),
        ("num_worst_tokens is -1", lambda: buffer.dispatch(mine.x, **numbers, **choice, num_worst_tokens=-1)),
        ("out.dtype is torch.float32", lambda: buffer.low_latency_combine(y, *ll, out=few.x.float())),
        ("new_num_sms is 3; allowed: even numbers", lambda: deep_ep.Buffer.set_num_sms(3)),
        ("num_ranks is 0; allowed: 1 .. 160", lambda: deep_ep.Buffer.get_dispatch_config(0)),
        ("num_ranks is a; allowed: 1 .. 160", lambda: deep_ep.Buffer.get_dispatch_config("a")),
        ("group and comm is neither; allowed: one of them", lambda: deep_ep.Buffer(None)),
        ("mask_status.dtype is", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(size))),
    ]
    for text, call in refused:
        raises(epd.InvalidArgument, text, call)
    raises(
        NotImplementedError,
        "use_logfmt is True; epd serves: False",
        lambda: buffer.low_latency_combine(y, *ll, use_logfmt=True),
    )
    # All refusals came before anything was submitted: ranks still agree.
    out, _, hook = buffer.low_latency_combine(y, *ll, return_recv_hook=None)
    assert hook is None and not out.any() and buffer.combine(rows, handle)[0].shape == mine.x.shape
    buffer.destroy()


def other_values_on_ranks(group: Any) -> str:
    """Ranks that differ where they must agree get an error with both values."""
    buffer = make_buffer(group, low_latency_mode=True)
    mine = ll_sent(buffer.group_size, 0)[buffer.rank]
    try:
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T + buffer.rank, E)
    except epd.Error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def a_rank_ends(group: Any) -> str:
    """The others get RANK_LOST with its number, and mask_status tells."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    mine = ll_sent(size, 0)[rank]
    buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E)
    torch.distributed.barrier(group)
    if rank == 1:
        buffer._groups.leave()  # as if the process had ended
        torch.distributed.barrier(group)
        return "left"
    torch.distributed.barrier(group)
    try:
        for _ in range(3):
            buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E)
    except epd.RankLost as error:
        return f"lost {error.rank}"
    return "nothing"


def mpi(group: Any) -> None:
    """comm in place of group: what of mpi4py is used."""

    class Communicator:
        def Get_rank(self) -> int:  # noqa: N802
            return group.rank()

        def Get_size(self) -> int:  # noqa: N802
            return group.size()

        def allgather(self, value: Any) -> list[Any]:
            values = [None] * group.size()
            torch.distributed.all_gather_object(values, value, group=group)
            return values

    buffer = deep_ep.Buffer(None, comm=Communicator(), explicitly_destroy=True)
    mine = sent_by(buffer.rank, "bf16")
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, E)
    rows, _, _, counts, handle, _ = buffer.dispatch(
        mine.x, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank
    )
    assert sum(counts) >= len(rows) > 0
    assert buffer.combine(rows, handle)[0].shape == mine.x.shape
    buffer.destroy()
