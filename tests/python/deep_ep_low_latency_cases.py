"""Cases of test_deep_ep.py in low-latency mode, for each rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
from deep_ep_sent import (
    BF16,
    FORMATS,
    LL_T,
    E,
    H,
    check_ll_combine,
    check_ll_dispatch,
    ll_answer,
    ll_sent,
    make_buffer,
    raises,
)

import epd


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
            assert (hook is not None, event.event is not None) == (hooks, async_finish)
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
            assert (hook is not None, event.event is not None) == (hooks, async_finish)
            check_ll_combine(rank, size, all_sent, step, out)
    buffer.destroy()


def left_out_rows(group: Any) -> None:
    """Rows that combine alone leaves out, by a negative choice or a weight of 0, and rows that nobody sent may hold
    anything."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    topk_idx = torch.arange(2 * LL_T).view(LL_T, 2) % E  # an even expert, then an odd one
    fewer, ones = topk_idx.clone(), torch.ones((LL_T, 2))
    fewer[:, 1] = -7
    for chosen, second in ((fewer, 1.0), (fewer, float("inf")), (topk_idx, 0.0), (topk_idx, -0.0)):
        weights = ones.clone()
        weights[:, 1] = second
        for zero_copy in (False, True):
            x = torch.ones((LL_T, H), dtype=BF16)
            y, counts, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, LL_T, E, use_fp8=False)
            y = y.clone()
            for number in range(E // size):
                odd = (rank * (E // size) + number) % 2
                y[number, 0 if odd else int(counts[number]) :] = float("nan")
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = y
            out = buffer.low_latency_combine(y, chosen, weights, handle, zero_copy=zero_copy)[0]
            assert torch.equal(out, torch.ones_like(out)), (second, zero_copy)
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


def batches_take_turns(group: Any) -> None:
    """Two batches are always under way: A's next dispatch came into the slot of B, which had no combine yet."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    held: list[Any] = []
    for step in range(7):
        batch = ll_sent(size, step)
        mine = batch[rank]
        got, counts, handle, _, _ = buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E, use_fp8=False)
        held.append((step, batch, got, counts, handle))
        for _, each, rows, count, its_handle in held:
            check_ll_dispatch("bf16", rank, size, each, rows, count, its_handle)
        if len(held) < 2:
            continue
        number, oldest, _, _, handle = held.pop(0)
        mine = oldest[rank]
        if number % 2:  # its slot stays, though another dispatch came in between
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = ll_answer(rank, size, number)
        y = torch.zeros_like(got) if number % 2 else ll_answer(rank, size, number)
        out, _, _ = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, handle, zero_copy=number % 2 == 1
        )
        check_ll_combine(rank, size, oldest, number, out)
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


def a_hook_is_interrupted(group: Any) -> None:
    """Its next call waits on, and so does the group's next operation."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    first = ll_sent(size, 0)[rank]
    buffer.low_latency_dispatch(first.x, first.topk_idx, LL_T, E)  # joins
    for step in range(2):
        all_sent = ll_sent(size, step)
        mine = all_sent[rank]
        if rank == 1:
            torch.distributed.barrier(group)  # rank 0 was interrupted
        got, counts, handle, _, hook = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, LL_T, E, use_fp8=False, return_recv_hook=True
        )
        if rank == 0:
            interrupted(hook if step == 0 else buffer._low_latency._groups.all()[0].settle)
            torch.distributed.barrier(group)
        hook()
        check_ll_dispatch("bf16", rank, size, all_sent, got, counts, handle)
    buffer.destroy()


def interrupted(call: Any) -> None:
    """Ctrl-C comes while the call waits."""
    waits = threading.Event()

    def handler(*_: object) -> None:
        if waits.is_set():
            waits.clear()
            raise KeyboardInterrupt

    def send() -> None:
        while waits.is_set():
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    sender = threading.Thread(target=send)
    try:
        waits.set()
        sender.start()
        raises(KeyboardInterrupt, "", call)
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)


def a_hook_of_what_has_failed(group: Any) -> None:
    """It tells so in each call, also when the next operation has told before."""
    for told_before in (False, True):
        buffer = make_buffer(group, low_latency_mode=True)
        mine = ll_sent(buffer.group_size, 0)[buffer.rank]

        def dispatch(wrong: bool) -> Any:
            topk_idx = mine.topk_idx.clone()
            topk_idx[:1, :1] = E if wrong and buffer.rank == 0 else 0
            return buffer.low_latency_dispatch(mine.x, topk_idx, LL_T, E, return_recv_hook=True)[4]

        dispatch(False)()  # joins
        if buffer.rank == 0:
            torch.distributed.barrier(group)  # the other one has submitted: the group is not broken yet
        hook = dispatch(True)
        if buffer.rank == 1:
            torch.distributed.barrier(group)
        if told_before:
            raises(epd.Error, "topk_idx", lambda: dispatch(False))
        for _ in range(2):
            raises(epd.Error, "topk_idx", hook)
        buffer.destroy()


def results_that_callers_change(group: Any) -> None:
    """Later callers get other tensors, without the history of earlier ones."""
    buffer = make_buffer(group, low_latency_mode=True)
    mine = ll_sent(buffer.group_size, 0)[buffer.rank]
    factor = torch.ones(H, requires_grad=True)

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E)

    shapes = [tuple(dispatch()[i].shape) for i in (1,)] + [tuple(t.shape) for t in dispatch()[0]]
    first = dispatch()
    dispatch()
    assert dispatch()[1] is first[1], "made once"
    for change in (
        lambda rows, counts: counts.unsqueeze_(0),
        lambda rows, counts: rows[1].transpose_(1, 2),
        lambda rows, counts: rows[1].requires_grad_(),
        lambda rows, counts: rows[1].mul_(factor[: rows[1].shape[2]]),
    ):
        for _ in range(2):  # both slots
            (rows, counts, *_) = dispatch()
            change(rows, counts)
        for _ in range(2):
            (rows, counts, *_) = dispatch()
            assert [tuple(counts.shape)] + [tuple(t.shape) for t in rows] == shapes
            assert not rows[0].requires_grad and not rows[1].requires_grad
    for _ in range(3):
        handle = buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, E, use_fp8=False)[2]
        y = buffer.get_next_low_latency_combine_buffer(handle)
        assert not y.requires_grad
        y[:] = factor.to(torch.bfloat16)
        buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, handle, zero_copy=True)
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


def first_calls_under_dynamo(group: Any) -> None:
    """They break the graph, as calls of a C extension do, and Dynamo leaves alone what is inside."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes, for which the end would wait
    buffer = make_buffer(group, low_latency_mode=True)
    mine = ll_sent(buffer.group_size, 0)[buffer.rank]

    def layer(x: Any, topk_idx: Any, topk_weights: Any) -> Any:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x * 1, topk_idx, LL_T, E, use_fp8=False, return_recv_hook=True
        )
        hook()
        y = torch.nan_to_num(rows * 2)
        return buffer.low_latency_combine(y, topk_idx, topk_weights, handle)[0] + 1

    given = (mine.x, mine.topk_idx, mine.topk_weights)
    compiled = torch.compile(layer, backend="aot_eager")
    out = compiled(*given)
    assert out.any() and torch.equal(out, layer(*given)) and torch.equal(out, compiled(*given))
    torch._dynamo.reset()
    buffer.destroy()
