"""Cases of test_deep_ep.py in normal mode, for each rank."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any, Optional

import deep_ep
import torch
from deep_ep_sent import (
    BF16,
    E,
    H,
    K,
    N,
    Sent,
    check_choices,
    check_rows,
    dispatch_sent,
    make_buffer,
    raises,
    received_by,
    sent_by,
)

import epd


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
    wrong = torch.zeros((3, 2), dtype=torch.int64)
    wrong[1, 0] = 77
    raises(epd.InvalidArgument, "topk_idx[1, 0] is 77; allowed: 0 ..", lambda: buffer.get_dispatch_layout(wrong, E))
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
        handle[0][:, rank] = 99  # a copy: the handle continues
        assert handle[3].tolist() == [token for _, token in expected]
        assert len(handle) == 6 and handle[4] is in_rank
        if with_topk:
            assert idx.dtype == torch.int64 and weights.dtype == torch.float32
            check_choices(rank, size, idx, weights, all_sent, expected)
            aligned = call(buffer.dispatch, mine.rows, **keywords, expert_alignment=8)[3]
            assert aligned == [-(-count // 8) * 8 for count in totals]
            for worst in (N * size, N * size + 5, 4096 * size + 3):
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
                y = torch.full((worst, H), float("nan"), dtype=BF16)  # nobody reads the rows that nobody sent
                y[: len(expected)] = 1
                out, _ = call(buffer.combine, y, many_handle)
                assert torch.equal(out, in_rank.sum(1, keepdim=True).to(BF16).expand(-1, H))
        else:
            assert idx is None and weights is None
        # The rows received before are unchanged.
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
    for bias in (None, biases[0], tuple(biases), (None, biases[1])):
        total = torch.zeros((n, H))
        for each in (bias,) if isinstance(bias, torch.Tensor) else bias or ():
            total += 0 if each is None else each.float()
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


def dropped_tokens(group: Any) -> None:
    """is_token_in_rank takes tokens away from ranks that topk_idx names. It was ignored."""
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    all_sent = [sent_by(each, "bf16") for each in range(size)]
    kept = [
        torch.rand((len(sent.x), size), generator=torch.Generator().manual_seed(each)) > 0.4
        for each, sent in enumerate(all_sent)
    ]
    expected = [row for row in received_by(rank, size, all_sent) if kept[row[0]][row[1], rank]]
    mine = all_sent[rank]
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, E)
    in_rank &= kept[rank]
    for given in (in_rank, in_rank.clone()):
        rows, idx, weights, _, handle, _ = buffer.dispatch(
            mine.x,
            is_token_in_rank=given,
            num_tokens_per_expert=per_expert,
            topk_idx=mine.topk_idx,
            topk_weights=mine.topk_weights,
        )
        assert len(rows) == len(expected) and torch.equal(handle[4], in_rank)
        check_rows(rows, all_sent, expected)
        check_choices(rank, size, idx, weights, all_sent, expected)
        out, _, _ = buffer.combine(torch.ones_like(rows), tuple(handle))
        assert torch.equal(out, in_rank.sum(1, keepdim=True).to(BF16).expand(-1, H))
    buffer.destroy()


def weights_of_any_width(group: Any) -> None:
    """A combine's topk_weights need not have as many columns as its dispatch had choices."""
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    all_sent = [sent_by(each, "bf16") for each in range(size)]
    mine, out_of = all_sent[rank], [received_by(each, size, all_sent) for each in range(size)]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, E)
    for choice in ({}, {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}):
        rows, _, _, _, handle, _ = buffer.dispatch(
            mine.x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, **choice
        )
        for columns in (K, 1, K + 2):
            given_of = [
                torch.rand((len(rows_of), columns), generator=torch.Generator().manual_seed(each))
                for each, rows_of in enumerate(out_of)
            ]
            summed = torch.zeros((len(mine.x), columns))
            for rows_of, given in zip(out_of, given_of):
                for row, (source, token) in enumerate(rows_of):
                    if source == rank:
                        summed[token] += given[row]
            out, weights, _ = buffer.combine(rows, handle, topk_weights=given_of[rank])
            assert torch.equal(weights, summed) and weights.is_contiguous()
            assert torch.allclose(out.float(), mine.x.float() * in_rank.sum(1, keepdim=True), rtol=0.01)
    buffer.destroy()


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
    idx.fill_(-1)  # a handle does not need it any more
    check_rows(buffer.dispatch(by_form["fp8"][rank].rows, handle=handle)[0], by_form["fp8"], expected)
    narrow = mine.x[:, : H // 3].contiguous()
    third = [each._replace(rows=each.x[:, : H // 3]) for each in by_form["bf16"]]
    check_rows(buffer.dispatch(narrow, handle=handle)[0], third, expected)
    buffer.destroy()


def many_handles(group: Any) -> None:
    """As many handles as layers x micro-batches; rank 0 forgets them at other times than the others."""
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    kept = []
    for step in range(24):
        all_sent = [sent_by(each, "bf16", step) for each in range(size)]
        expected = received_by(rank, size, all_sent)
        rows, handle = dispatch_sent(buffer, all_sent)
        kept.append((handle, rows, all_sent, expected))
        if step % 6 == 5:
            for handle, rows, sent, rows_of in reversed(kept[-6:]):
                check_rows(rows, sent, rows_of)
                check_rows(buffer.dispatch(sent[rank].x, handle=handle)[0], sent, rows_of)
                out = buffer.combine(rows, handle)[0]
                assert out.shape == sent[rank].x.shape
            del handle
            del kept[: len(kept) if rank == 0 else -2]
            gc.collect()
    buffer.destroy()


def _random_rows(made: torch.Generator, n: int, columns: int, dtype: Any) -> Any:
    """Rows of random bits."""
    width = columns * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (n, width), generator=made, dtype=torch.uint8).view(dtype)


def rows_of_other_types(group: Any) -> None:
    """epd moves their bytes. A combine of bf16 rows under the same handle is served, of other rows it is refused."""
    buffer = make_buffer(group)
    rank, size = buffer.rank, buffer.group_size
    names = ("float8_e4m3fn", "float8_e5m2", "int8")
    one_byte = [getattr(torch, name) for name in names if hasattr(torch, name)]
    forms = [(torch.float16, 256, None, 0), (torch.float32, 6, None, 0), (torch.int16, 2880, None, 0)]
    forms += [(one_byte[-1], 24, None, 0), (torch.bool, 40, None, 0)]
    forms += [(kind, columns, torch.float32, 9) for kind in one_byte for columns in (256, 2880)]
    forms += [(one_byte[0], 256, torch.float32, 1), (one_byte[0], 256, torch.int32, 3)]
    for dtype, columns, scales_dtype, blocks in forms:
        made = torch.Generator().manual_seed(columns)
        all_sent = []
        for each in range(size):
            sent = sent_by(each, "bf16")
            n = len(sent.x)
            rows = _random_rows(made, n, columns, dtype)
            if scales_dtype is not None:
                scales = _random_rows(made, n, blocks, scales_dtype)
                rows = (rows, scales.T.contiguous().T if each else scales)
            all_sent.append(sent._replace(rows=rows))
        mine, expected = all_sent[rank], received_by(rank, size, all_sent)
        layout = buffer.get_dispatch_layout(mine.topk_idx, E)
        choice = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}
        for worst in (0, size * N):
            got, _, _, _, handle, event = buffer.dispatch(
                mine.rows, num_tokens_per_expert=layout[2], is_token_in_rank=layout[3], **choice,
                num_worst_tokens=worst, async_finish=worst > 0,
            )  # fmt: skip
            again = buffer.dispatch(mine.rows, handle=handle)[0]
            for delivered in (got, again):
                for part, like in zip(_parts_of(delivered), _parts_of(mine.rows)):
                    assert part.dtype == like.dtype and part.shape[1:] == like.shape[1:]
                    assert len(part) == (worst or len(expected))
                check_rows(delivered, all_sent, expected)
        other = _parts_of(got)[0]
        text = f"x.dtype is {dtype}; allowed: torch.bfloat16"
        raises(epd.InvalidArgument, text, lambda: buffer.combine(other, handle))
        y = torch.ones((len(other), 256 if columns == 6 else columns), dtype=BF16)
        out = buffer.combine(y, handle)[0]
        assert torch.equal(out, layout[3].sum(1, keepdim=True).to(BF16).expand_as(out))
        known = [each._replace(rows=each.x) for each in all_sent]
        check_rows(buffer.dispatch(mine.x, handle=handle)[0], known, expected)
    buffer.destroy()


def _parts_of(rows: Any) -> tuple[Any, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


def hidden_sizes(group: Any) -> None:
    """Any multiple of 8, in both modes."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    for hidden in (8, 64, 2880):
        assert deep_ep.Buffer.get_dispatch_config(size).get_nvl_buffer_size_hint(hidden * 2, size) > 0
        assert deep_ep.Buffer.get_low_latency_rdma_size_hint(16, hidden, size, E) > 0
        made = torch.Generator().manual_seed(hidden)
        all_sent = [sent_by(each, "bf16") for each in range(size)]
        for number, each in enumerate(all_sent):
            x = torch.randint(-64, 65, (len(each.x), hidden), generator=made).to(BF16)
            all_sent[number] = each._replace(x=x, rows=x)
        mine, expected = all_sent[rank], received_by(rank, size, all_sent)
        rows, handle = dispatch_sent(buffer, all_sent)
        check_rows(rows, all_sent, expected)
        config = next(iter(buffer._groups.all())).group.config
        real = dataclasses.replace(config, num_ranks=8, num_experts=256, hidden=7168, topk=8)
        assert config.max_tokens == 2048 and real.group_bytes(epd.DeviceKind.CUDA).rank <= 400 << 20
        ranks = (buffer.get_dispatch_layout(mine.topk_idx, E)[3]).sum(1, keepdim=True)
        assert torch.equal(buffer.combine(rows, handle)[0], (mine.x * ranks).to(BF16))
        for use_fp8 in (False, True):
            got, counts, low, _, _ = buffer.low_latency_dispatch(mine.x, mine.topk_idx, 16, E, use_fp8=use_fp8)
            answer = torch.ones((E // size, 16 * size, hidden), dtype=BF16) if use_fp8 else got
            assert not use_fp8 or got[1].shape[2] == -(-hidden // 128)
            out = buffer.low_latency_combine(answer, mine.topk_idx, torch.ones_like(mine.topk_weights), low)[0]
            chosen = (mine.topk_idx >= 0).sum(1, keepdim=True)
            assert torch.equal(out, (chosen if use_fp8 else mine.x * chosen).to(BF16).expand_as(out))
    buffer.destroy()
