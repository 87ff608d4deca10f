"""Cases of test_deep_ep.py with more tokens and handles than a group has, and with fewer, for each rank."""

from __future__ import annotations

import contextlib
import gc
from typing import Any, Iterator

import deep_ep
import pytest
import torch
from deep_ep.growth import Size
from deep_ep_sent import (
    BF16,
    FORMATS,
    LL_T,
    E,
    H,
    K,
    Sent,
    check_ll_combine,
    check_ll_dispatch,
    check_rows,
    dispatch_sent,
    ll_answer,
    ll_sent,
    make_buffer,
    raises,
    received_by,
    sent_by,
)

import epd


@contextlib.contextmanager
def sizes(first: Size, most: Size = Size(64, 16)) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_ep.groups, "FIRST", first)
        patch.setattr(deep_ep.normal, "FIRST_UNTOLD", first)
        for module in (deep_ep.dispatches, deep_ep.given, deep_ep.normal):
            patch.setattr(module, "MOST", most)
        yield


def _sent(*tokens: int) -> list[Sent]:
    """So many tokens of each rank."""
    all_sent = []
    for rank, n in enumerate(tokens):
        made = torch.Generator().manual_seed(100 * n + rank)
        x = torch.randint(-64, 65, (n, H), generator=made).to(BF16)
        idx = torch.randint(-1, E, (n, K), generator=made, dtype=torch.int64)
        all_sent.append(Sent(x, x, idx, torch.ones((n, K))))
    return all_sent


def _use(buffer: Any, handle: Any, all_sent: list[Sent]) -> None:
    rank, size = buffer.rank, buffer.group_size
    rows = buffer.dispatch(all_sent[rank].x, handle=handle)[0]
    check_rows(rows, all_sent, received_by(rank, size, all_sent))
    ranks = handle[4].sum(1, keepdim=True)
    assert torch.equal(buffer.combine(rows, handle)[0], (all_sent[rank].x * ranks).to(BF16))


def _groups(buffer: Any) -> list[Size]:
    return [joined.size for joined in buffer._groups.all()]


def more_tokens(group: Any) -> None:
    """First one rank has more, which the others do not know; then all, with different numbers. Handles of before stay
    good, for rows of another hidden size too. The smaller groups are left."""
    with sizes(Size(8, 4)):
        buffer = make_buffer(group)
        dispatch_sent(buffer, _sent(1, 1))
        first = buffer._groups.all()[0]
        kept = []
        for tokens, groups in (
            ((8, 3), [8]),
            ((1, 9), [16]),
            ((64, 17), [64]),
            ((2, 2), [64]),
        ):
            all_sent = _sent(*tokens)
            rows, handle = dispatch_sent(buffer, all_sent)
            check_rows(rows, all_sent, received_by(buffer.rank, buffer.group_size, all_sent))
            kept.append((handle, all_sent))
            assert [size.tokens for size in _groups(buffer)] == groups
        assert first.group.leave(), "something keeps the membership"
        for handle, all_sent in kept:
            _use(buffer, handle, all_sent)
            narrow = [each._replace(x=each.x[:, :8].contiguous(), rows=each.x[:, :8]) for each in all_sent]
            _use(buffer, handle, narrow)
        assert [size.tokens for size in _groups(buffer)] == [64, 64]
        buffer.destroy()


def more_handles(group: Any) -> None:
    """One rank keeps more; the other one forgets its own. Those in cycles are collected first."""
    with sizes(Size(16, 4)):
        buffer = make_buffer(group)
        all_sent = [sent_by(each, "bf16") for each in range(buffer.group_size)]
        gc.disable()
        try:
            for _ in range(9):
                cycle: list[Any] = [dispatch_sent(buffer, all_sent)[1]]
                cycle.append(cycle)
        finally:
            gc.enable()
        assert _groups(buffer) == [Size(16, 4)]
        del cycle
        kept = []
        for _ in range(11):
            kept.append(dispatch_sent(buffer, all_sent)[1])
            del kept[: -2 if buffer.rank == 1 else 0]
            gc.collect()
        for handle in reversed(kept[-2:]):
            _use(buffer, handle, all_sent)
        assert _groups(buffer) == [Size(16, 8)]
        kept = kept[-1:]
        for _ in range(8):
            kept.append(_forgotten(dispatch_sent(buffer, all_sent)[1]))
        for handle in kept:
            _use(buffer, handle, all_sent)
        assert _groups(buffer) == [Size(16, 16)]
        buffer.destroy()


def _forgotten(handle: Any) -> Any:
    """The same values, without what a group knows: it is established again."""
    return tuple(part.clone() for part in handle)


def as_many_as_there_are(group: Any) -> None:
    """A request that no group can serve is refused, and the group continues."""
    with sizes(Size(16, 1), Size(16, 4)):
        buffer = make_buffer(group)
        all_sent = [sent_by(each, "bf16") for each in range(buffer.group_size)]
        mine = all_sent[buffer.rank]
        kept = [dispatch_sent(buffer, all_sent) for _ in range(1 + 2 + 4)]
        text = "4 handles of normal mode (8 experts, hidden 264, 3 choices) are alive; allowed: 4"
        raises(epd.ResourceExhausted, text, lambda: dispatch_sent(buffer, all_sent))
        del kept[-1]
        rows, handle = dispatch_sent(buffer, all_sent)
        _use(buffer, handle, all_sent)
        many = _sent(17, 17)
        raises(epd.InvalidArgument, "x.shape[0] is 17; allowed: 0 .. 16", lambda: dispatch_sent(buffer, many))
        numbers = {"num_tokens_per_expert": buffer.get_dispatch_layout(mine.topk_idx, E)[2]}
        choice = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights, "num_worst_tokens": 32}
        text = "4 handles of normal mode (8 experts, hidden 264, 3 choices) are alive; allowed: 4 in graphs"
        raises(epd.ResourceExhausted, text, lambda: buffer.dispatch(mine.x, **numbers, **choice))
        buffer.destroy()
    with sizes(Size(8, 2)):
        buffer = make_buffer(group)
        text = f"x.shape[0] is {len(mine.x)}; allowed: 0 .. 8 with num_worst_tokens 12 of 2 ranks"
        choice["num_worst_tokens"] = 12
        raises(epd.InvalidArgument, text, lambda: buffer.dispatch(mine.x, **numbers, **choice))
        choice["num_worst_tokens"] = 32
        rows = buffer.dispatch(mine.x, **numbers, **choice)[0]
        check_rows(rows, all_sent, received_by(buffer.rank, buffer.group_size, all_sent))
        assert _groups(buffer) == [Size(16, 2)]
        buffer.destroy()


def no_memory_for_more(group: Any) -> None:
    """All ranks are told, and calls that fit go on."""
    with sizes(Size(8, 4)):
        buffer = make_buffer(group)
        few, many = _sent(3, 4), _sent(9, 1)
        rows, handle = dispatch_sent(buffer, few)
        with pytest.MonkeyPatch.context() as patch:

            def refuse(*_: object) -> None:
                raise epd.ResourceExhausted("no memory")

            patch.setattr(buffer._groups.session, "join", refuse)
            for _ in range(2):
                raises(epd.ResourceExhausted, "no memory", lambda: dispatch_sent(buffer, many))
                _use(buffer, handle, few)
        _use(buffer, dispatch_sent(buffer, many)[1], many)
        _use(buffer, handle, few)
        buffer.destroy()


def fewer_low_latency_tokens(group: Any, kind: str) -> None:
    """Than the group has: one group serves all numbers, the largest. kind: of results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPD_DEEPEP_VIEWS", str(int(kind == "views")))
        buffer = make_buffer(group, low_latency_mode=True, enable_shrink=kind == "shrink")
    _combined(buffer, *_dispatched(buffer, "bf16", 0, LL_T))
    first, held = buffer._groups.all()[0], []
    for step, most in enumerate((LL_T, 4, LL_T, 5, LL_T + 3, 4, LL_T)):
        for form in ("bf16", "fp8", "ue8m0"):
            held.append(_dispatched(buffer, form, step, most))
            assert [size.tokens for size in _groups(buffer)] in ([LL_T], [LL_T, LL_T + 3], [LL_T + 3])
            if len(held) == 2:  # the older one's group may be another one by now
                _combined(buffer, *held.pop(0))
    held.clear()
    _combined(buffer, *_dispatched(buffer, "bf16", 0, 1))
    assert len(_groups(buffer)) == (2 if kind == "shrink" else 1)
    assert kind == "shrink" or first.group.leave(), "something keeps the membership"
    _combined(buffer, *_dispatched(buffer, "bf16", 0, LL_T + 3))
    if kind != "shrink":
        x, idx = torch.ones((4, H), dtype=BF16), torch.zeros((4, K), dtype=torch.int64)  # all to rank 0
        tokens = 2 if buffer.rank == 0 else 4
        arguments = (x[:tokens], idx[:tokens], tokens, E)
        if buffer.rank == 0:
            text = "num_max_dispatch_tokens_per_rank is of 4 rows in a block, and 6 have come"
            raises(epd.InvalidArgument, text, lambda: buffer.low_latency_dispatch(*arguments))
        else:
            buffer.low_latency_dispatch(*arguments)
    buffer.destroy()


def _dispatched(buffer: Any, form: str, step: int, most: int) -> Any:
    rank, size = buffer.rank, buffer.group_size
    all_sent = ll_sent(size, step, most)
    mine = all_sent[rank]
    got, counts, handle, _, hook = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, most, E, return_recv_hook=True, **FORMATS[form][0]
    )
    hook()
    check_ll_dispatch(form, rank, size, all_sent, got, counts, handle, most)
    return all_sent, handle, step, most


def _combined(buffer: Any, all_sent: list[Sent], handle: Any, step: int, most: int) -> None:
    rank, size = buffer.rank, buffer.group_size
    mine, y = all_sent[rank], ll_answer(rank, size, step, most)
    for given in (handle, tuple(handle)):
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(given)[:] = y
            rows = torch.full_like(y, float("nan")) if zero_copy else y
            out = buffer.low_latency_combine(rows, mine.topk_idx, mine.topk_weights, given, zero_copy=zero_copy)[0]
            check_ll_combine(rank, size, all_sent, step, out, most)
