"""Cases of test_deep_ep.py with handles, for each rank: taken apart, copied, pickled, kept by autograd, given to another
Buffer."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from deep_ep.growth import Size
from deep_ep.handles import normal_routing
from deep_ep_growth_cases import sizes
from deep_ep_sent import (
    BF16,
    LL_T,
    E,
    H,
    check_ll_combine,
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


def _parts(change: Any) -> Any:
    return lambda handle: tuple(change(part) if isinstance(part, torch.Tensor) else part for part in handle)


def _saved(handle: Any) -> Any:
    """As torch.save and torch.load have it."""
    file = io.BytesIO()
    torch.save(tuple(handle), file)
    file.seek(0)
    return torch.load(file)


class _Saving(torch.autograd.Function):
    """XTuner's way: the tensors of a handle are saved, and a plain tuple comes back."""

    @staticmethod
    def forward(ctx: Any, x: Any, handle: Any) -> Any:
        ctx.save_for_backward(*(part for part in handle if isinstance(part, torch.Tensor)))
        ctx.others = [part for part in handle if not isinstance(part, torch.Tensor)]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _Saving.handle = (*ctx.saved_tensors, *ctx.others)
        return gradient, None


def _through_autograd(handle: Any) -> Any:
    x = torch.zeros(1, requires_grad=True)
    out = _Saving.apply(x, handle)
    del handle
    out.backward()
    return _Saving.handle


FORMS = {
    "as it is": lambda handle: handle,
    "a tuple": tuple,
    "a list": list,
    "through autograd": _through_autograd,
    "a copy": copy.copy,
    "copies of the parts": _parts(copy.copy),
    "a deep copy": copy.deepcopy,
    "pickled": lambda handle: pickle.loads(pickle.dumps(handle)),
    "saved": _saved,
    "clones": _parts(lambda part: part.clone()),
    "detached": _parts(lambda part: part.detach()),
}


def normal(group: Any) -> None:
    """In each form, with its Buffer, a larger one, and when the first Buffer has ended."""
    first, second = make_buffer(group), make_buffer(group, num_nvl_bytes=1 << 20)
    all_sent = [sent_by(each, "bf16") for each in range(first.group_size)]
    kept = []
    for form, change in FORMS.items():
        handle = change(dispatch_sent(first, all_sent)[1])
        assert len(handle) == 6, form
        for buffer in (first, second, second):
            _use_normal(buffer, handle, all_sent)
        if form in ("a tuple", "pickled"):
            kept.append(change(dispatch_sent(first, all_sent)[1]))
    first.destroy()
    for handle in kept:
        _use_normal(second, handle, all_sent)
    second.destroy()


def _use_normal(buffer: Any, handle: Any, all_sent: Any) -> None:
    rank, size = buffer.rank, buffer.group_size
    mine, expected = all_sent[rank], received_by(rank, size, all_sent)
    ranks = handle[4].sum(1, keepdim=True)
    answer = torch.ones((len(expected), 2 * H), dtype=BF16)  # of a wider layer; this is its first use
    assert torch.equal(buffer.combine(answer, handle)[0], ranks.to(BF16).expand(-1, 2 * H))
    rows = buffer.dispatch(mine.x, handle=handle)[0]
    check_rows(rows, all_sent, expected)
    out, weights, _ = buffer.combine(rows, handle, topk_weights=torch.ones(len(expected), mine.topk_idx.shape[1]))
    assert torch.equal(out, (mine.x * ranks).to(BF16)) and torch.equal(weights, ranks.float().expand_as(weights))


def normal_written_to(group: Any) -> None:
    """Tensors of a handle to which the values of another handle are written are a handle of those."""
    buffer = make_buffer(group)
    all_sent = [sent_by(each, "bf16") for each in range(buffer.group_size)]
    x = all_sent[buffer.rank].x
    rows, handle = dispatch_sent(buffer, all_sent)
    other_sent = [each._replace(topk_idx=each.topk_idx.flip(0)) for each in all_sent]
    other_rows, other = dispatch_sent(buffer, other_sent)
    assert rows.shape == other_rows.shape and not torch.equal(rows, other_rows)
    static = tuple(part.clone() for part in handle)
    assert torch.equal(buffer.dispatch(x, handle=static)[0], rows)
    for part, new in zip(static, other):
        part.copy_(new)
    assert torch.equal(buffer.dispatch(x, handle=static)[0], other_rows)
    buffer.destroy()


def normal_established_later(group: Any) -> None:
    """A handle that another Buffer could not take at first is as good afterwards."""
    first, second = make_buffer(group), make_buffer(group)
    all_sent = [sent_by(each, "bf16") for each in range(first.group_size)]
    handle = FORMS["pickled"](dispatch_sent(first, all_sent)[1])
    x = all_sent[first.rank].x
    with sizes(Size(16, 8), Size(16, 8)):
        kept = [dispatch_sent(second, all_sent) for _ in range(8)]
        raises(epd.ResourceExhausted, "8 handles of normal mode", lambda: second.dispatch(x, handle=handle))
        kept.clear()
    routing = normal_routing(handle, x.device, first.group_size)
    assert routing.offsets is None and not routing.handles  # a dispatch that was refused has told nothing
    _use_normal(second, handle, all_sent)
    first.destroy()
    second.destroy()


def normal_without_topk_idx(group: Any) -> None:
    first, second = make_buffer(group), make_buffer(group)
    rank, size = first.rank, first.group_size
    all_sent = [sent_by(each, "bf16") for each in range(size)]
    layout = first.get_dispatch_layout(all_sent[rank].topk_idx, E)
    rows, _, _, _, handle, _ = first.dispatch(
        all_sent[rank].x, num_tokens_per_expert=layout[2], is_token_in_rank=layout[3]
    )
    for change in (FORMS["pickled"], FORMS["a tuple"]):
        again = second.dispatch(all_sent[rank].x, handle=change(handle))[0]
        check_rows(again, all_sent, received_by(rank, size, all_sent))
        assert torch.equal(again, rows)
    first.destroy()
    second.destroy()


def low_latency(group: Any, views: bool) -> None:
    """In each form, with its Buffer, another one, and when the first Buffer has ended; also made before the rows have
    come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPD_DEEPEP_VIEWS", str(int(views)))
        first, second = (make_buffer(group, low_latency_mode=True) for _ in range(2))
    kept = []
    for step, (form, change) in enumerate(FORMS.items()):
        all_sent, others = (ll_sent(first.group_size, number) for number in (step, step + 100))
        one, two = (change(_dispatched(first, each)) for each in (all_sent, others))
        assert len(one) == 5, form
        for buffer, zero_copy in ((first, False), (first, True), (second, False), (second, True)):
            _combine_fewer(buffer, one, all_sent, step, zero_copy)
        _combine_fewer(first, two, others, step, False)
        kept.append((one, all_sent, step))
    handles = [_dispatched(first, all_sent) for _ in range(2)]
    assert handles.index(handles[1]) == 1 and len(set(handles)) == 2 and len(handles[0] + (0,)) == 6
    mine = all_sent[first.rank]
    _, _, late, _, hook = first.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E, return_recv_hook=True)
    kept.append((tuple(late), all_sent, step))
    hook()
    first.destroy()
    for one, all_sent, step in kept:
        _combine_fewer(second, one, all_sent, step, False)
    second.destroy()


def _dispatched(buffer: Any, all_sent: Any) -> Any:
    mine = all_sent[buffer.rank]
    return buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E, use_fp8=False)[2]


def _combine_fewer(buffer: Any, handle: Any, all_sent: Any, seed: int, zero_copy: bool) -> None:
    """The combine's topk_idx counts: choices that are negative there add nothing, whatever their weights."""
    rank, size = buffer.rank, buffer.group_size
    mine, y = all_sent[rank], ll_answer(rank, size, seed)
    fewer = mine.topk_idx.clone()
    fewer[::2, 0] = -5
    fewer[1::2, 1] = torch.iinfo(torch.int64).min
    weights = mine.topk_weights.masked_fill(fewer < 0, float("nan"))
    if zero_copy:
        buffer.get_next_low_latency_combine_buffer(handle)[:] = y
        y = torch.full_like(y, float("nan"))
    out = buffer.low_latency_combine(y, fewer, weights, handle, zero_copy=zero_copy)[0]
    counted = [
        each if number != rank else mine._replace(topk_weights=mine.topk_weights.masked_fill(fewer < 0, 0))
        for number, each in enumerate(all_sent)
    ]
    check_ll_combine(rank, size, counted, seed, out)


def choices_that_are_written_to(group: Any) -> None:
    """After the dispatch, in the tensor itself; also in inference mode, where torch counts no versions."""
    buffer = make_buffer(group, low_latency_mode=True)
    for inference in (False, True):
        with torch.inference_mode(inference):
            topk_idx = torch.arange(2 * LL_T).view(LL_T, 2) % E
            x = torch.ones((LL_T, H), dtype=BF16)
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, LL_T, E, use_fp8=False)
            for wanted in (2.0, 1.0):
                out = buffer.low_latency_combine(rows, topk_idx, torch.ones(LL_T, 2), handle)[0]
                assert torch.equal(out, torch.full_like(out, wanted))
                topk_idx[:, 1] = -1
    buffer.destroy()


def wrong(group: Any) -> None:
    """Arguments that are no handle are refused before anything is submitted."""
    buffer = make_buffer(group, low_latency_mode=True)
    all_sent = [sent_by(each, "bf16") for each in range(buffer.group_size)]
    few = ll_sent(buffer.group_size, 0)
    rows, handle = dispatch_sent(buffer, all_sent)
    low = _dispatched(buffer, few)
    y = ll_answer(buffer.rank, buffer.group_size, 0)
    mine = few[buffer.rank]

    def combine(given: Any) -> Any:
        return lambda: buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, given)

    refused = [
        ("handle is a tuple of 2; allowed: a tuple of 6 tensors", lambda: buffer.combine(rows, (1, 2))),
        ("handle is a int; allowed: a tuple of 6 tensors", lambda: buffer.combine(rows, 7)),
        ("handle is a tuple of 6; allowed", lambda: buffer.combine(rows, (None,) * 6)),
        ("handle is tensors of", lambda: buffer.combine(rows, (rows,) * 6)),
        ("handle is a LowLatencyHandle of 5", lambda: buffer.combine(rows, low)),
        (
            "handle is of 1 ranks on cpu",
            lambda: buffer.combine(rows, (*handle[:3], rows[:, 0].clone(), rows[:, :1] > 0, rows)),
        ),
        ("handle is a tuple of 6; allowed: a tuple of 2 tensors and 3 numbers", combine(handle)),
        ("handle is a tuple of 5; allowed", combine((None, None, LL_T, H, E))),
        ("handle[0].shape is", combine((y[:, :1].int(), low[1].clone(), LL_T, H, E))),
        ("handle[1].dtype is", combine((low[0], low[1].int(), LL_T, H, E))),
        ("x.shape is", combine((low[0], low[1].clone(), LL_T, H // 2, E))),
    ]
    for text, call in refused:
        raises(epd.InvalidArgument, text, call)
    # Handles of fewer rows than come: the daemon writes no more than fit.
    short = (*handle[:3], handle[3][:1].clone(), *handle[4:])
    raises(epd.ResourceExhausted, "recv_rows is 1", lambda: buffer.dispatch(all_sent[buffer.rank].x, handle=short))
    buffer.destroy()
