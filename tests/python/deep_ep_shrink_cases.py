"""Cases of test_deep_ep_shrink.py, for each rank: ranks that are masked, late or gone, and slow ones."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import signal
import threading
import time
from typing import Any, Callable, Iterable, Optional

import deep_ep
import numpy as np
import reference
import torch
import torch.distributed as dist
from deep_ep_sent import (
    BF16,
    FORMATS,
    LL_T,
    E,
    H,
    Sent,
    as_bits,
    as_inputs,
    check_ll_dispatch,
    ll_sent,
    ll_shape,
    make_buffer,
    raises,
)
from deep_ep import low_latency, operations
from deep_ep.operations import Results
from deep_ep.shrink import Steps

import epd

def between(all_sent: list[Sent], alive: Any) -> list[Sent]:
    """The choices that are served: alive(source, target)."""
    local = E // len(all_sent)
    served = []
    for source, sent in enumerate(all_sent):
        chosen = sent.topk_idx.clone()
        for target in range(len(all_sent)):
            if not alive(source, target):
                chosen[(chosen >= 0) & (torch.div(chosen, local, rounding_mode="floor") == target)] = -1
        served.append(sent._replace(topk_idx=chosen))
    return served


def without(all_sent: list[Sent], gone: Iterable[int]) -> list[Sent]:
    return between(all_sent, lambda source, target: source not in gone and target not in gone)


def answer_to(expert: int, source: int, token: int, step: int) -> Any:
    """The row that an expert answers."""
    made = torch.Generator().manual_seed(((step * E + expert) * 8 + source) * LL_T + token)
    return torch.randint(-64, 65, (H,), generator=made).to(BF16)


def answers(rank: int, size: int, step: int, handle: Any) -> Any:
    """To the rows that this rank has received, where they lie. NaN elsewhere."""
    local = E // size
    y = torch.full((local, size * LL_T, H), float("nan")).to(BF16)
    src_info, layout_range = handle[0], handle[1]
    for expert in range(local):
        for source, packed in enumerate(layout_range[expert].tolist()):
            begin, count = packed >> 32, packed & 0xFFFFFFFF
            for place in range(begin, begin + count):
                token = int(src_info[expert, place])
                y[expert, place] = answer_to(rank * local + expert, source, token, step)
    return y


def check_combined(rank: int, served: list[Sent], step: int, out: Any) -> None:
    """served: the choices whose answers count, which lie as the reference would have them."""
    size, local = len(served), E // len(served)
    config, inputs = ll_shape(size, epd.Payload.BF16, epd.ScaleFormat.FLOAT32), as_inputs(served)
    ys = []
    for target in range(size):
        y = torch.zeros((local * size * LL_T, H), dtype=BF16)
        for row in reference.received_rows(config, inputs, target)[0]:
            y[row.place] = answer_to(target * local + row.expert, row.source, row.token, step)
        ys.append(as_bits(y))
    expected = reference.combined(config, inputs, ys, rank, True, [])
    np.testing.assert_array_equal(as_bits(out), expected)


def mask_of(buffer: deep_ep.Buffer) -> list[int]:
    status = torch.full((buffer.group_size,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return [rank for rank, masked in enumerate(status.tolist()) if masked]


class Layer:
    """Dispatch and combine of one rank, in steps."""

    def __init__(self, buffer: deep_ep.Buffer, form: str = "bf16", hooks: bool = False) -> None:
        self.buffer, self.form, self.hooks = buffer, form, hooks
        self.rank, self.size = buffer.rank, buffer.group_size

    def dispatch(self, step: int, **options: Any) -> tuple[Any, Any, Any]:
        mine = ll_sent(self.size, step)[self.rank]
        got, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, LL_T, E, return_recv_hook=self.hooks, **FORMATS[self.form][0], **options
        )
        if hook is not None:
            hook()
        return got, counts, handle

    def combine(self, step: int, handle: Any, zero_copy: bool = False, **options: Any) -> Any:
        mine = ll_sent(self.size, step)[self.rank]
        y = answers(self.rank, self.size, step, handle)
        if zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
            y = torch.full_like(y, 7)
        out, _, hook = self.buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, handle, zero_copy=zero_copy, return_recv_hook=self.hooks, **options
        )
        if hook is not None:
            hook()
        return out

    def checked(self, step: int, served: list[Sent]) -> None:
        got, counts, handle = self.dispatch(step)
        check_ll_dispatch(self.form, self.rank, self.size, served, got, counts, handle)
        for zero_copy in (False, True):
            check_combined(self.rank, served, step, self.combine(step, handle, zero_copy))
        check_ll_dispatch(self.form, self.rank, self.size, served, got, counts, handle)


# ---- masks -----------------------------------------------------------------------------------------


def masks(group: Any, form: str, hooks: bool) -> None:
    """Each rank has masks of its own. All ranks live and call."""
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, size = buffer.rank, buffer.group_size
    layer = Layer(buffer, form, hooks)
    for step, masked_by in enumerate([{}, {0: {2}, 1: {2}}, {0: {2}, 1: {2, 0}, 3: {3}}, {2: {0, 1, 2, 3}}, {}]):
        for each in range(size):
            if each in masked_by.get(rank, ()):
                buffer.low_latency_update_mask_buffer(each, True)
            elif step % 2 == 0:
                buffer.low_latency_update_mask_buffer(each, False)
            elif each == 0:
                buffer.low_latency_clean_mask_buffer()
        assert mask_of(buffer) == sorted(masked_by.get(rank, ()))

        def alive(source: int, target: int, masked_by: Any = masked_by) -> bool:
            return target not in masked_by.get(source, ()) and source not in masked_by.get(target, ())

        served = between(ll_sent(size, step), alive)
        assert not masked_by or any(
            not torch.equal(a.topk_idx, b.topk_idx) for a, b in zip(served, ll_sent(size, step))
        )
        layer.checked(step, served)
    # A mask that comes between a dispatch and its combine does not count for this combine.
    all_sent = ll_sent(size, 9)
    _, _, handle = layer.dispatch(9)
    buffer.low_latency_update_mask_buffer(1, True)
    check_combined(rank, all_sent, 9, layer.combine(9, handle))
    buffer.destroy()


def refusals(group: Any) -> None:
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    mask = buffer.low_latency_update_mask_buffer
    raises(epd.InvalidArgument, "enable_shrink is False; allowed: True for masks", lambda: mask(1, True))
    buffer.destroy()
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
    mask = buffer.low_latency_update_mask_buffer
    raises(epd.InvalidArgument, f"rank_to_mask is {size}; allowed: 0 .. {size - 1}", lambda: mask(size, True))
    raises(epd.InvalidArgument, "rank_to_mask is -1", lambda: mask(-1))
    few = ll_sent(size, 0)[rank]
    for stats, text in (
        (torch.zeros(size), "dispatch_wait_recv_cost_stats.dtype is torch.float32; allowed: torch.int64"),
        (torch.zeros((size, size), dtype=torch.int64), f"dispatch_wait_recv_cost_stats.shape is [{size}, {size}]"),
    ):
        raises(
            epd.InvalidArgument,
            text,
            lambda stats=stats: buffer.low_latency_dispatch(
                few.x, few.topk_idx, LL_T, E, dispatch_wait_recv_cost_stats=stats
            ),
        )
    layer = Layer(buffer)
    _, _, handle = layer.dispatch(0)
    short = torch.zeros(size - 1, dtype=torch.int64)
    raises(
        epd.InvalidArgument,
        f"combine_wait_recv_cost_stats.shape is [{size - 1}]; allowed: [{size}]",
        lambda: layer.combine(0, handle, combine_wait_recv_cost_stats=short),
    )
    layer.checked(1, ll_sent(size, 1))  # nothing was submitted: ranks still agree
    buffer.destroy()


# ---- ranks that are lost ---------------------------------------------------------------------------

STEPS = 8


def some_are_killed(group: Any, form: str, hooks: bool) -> str:
    """Rank 2 ends before a dispatch, then rank 1 before a combine. The others go on, at last without any other."""
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, size = buffer.rank, buffer.group_size
    layer = Layer(buffer, form, hooks)
    for step in range(STEPS):
        all_sent = ll_sent(size, step)
        gone = ([2] if step >= 2 else []) + ([1] if step > 4 else [])
        if rank == 2 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        served = without(all_sent, gone)
        got, counts, handle = layer.dispatch(step)
        if step != 4:  # then some have rank 1's rows
            check_ll_dispatch(form, rank, size, served, got, counts, handle)
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if step >= 4:
            served = without(all_sent, [1, 2])
            gone = [1, 2]
        check_combined(rank, served, step, layer.combine(step, handle, zero_copy=step % 2 == 1))
        assert mask_of(buffer) == sorted(gone), (step, mask_of(buffer))
    check_what_a_loss_forbids(buffer, layer, [1, 2])
    buffer.destroy()
    return "went on"


def check_what_a_loss_forbids(buffer: deep_ep.Buffer, layer: Layer, gone: list[int]) -> None:
    lost = ", ".join(str(rank) for rank in gone)
    mine = ll_sent(layer.size, 0)[layer.rank]
    for text, call in (
        (f"mask of rank {gone[0]}, which is lost, is False", lambda: buffer.low_latency_update_mask_buffer(gone[0])),
        (
            f"is the first call of its kind after the loss of {lost}; epd serves: kinds of calls",
            lambda: buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T + 3, E),
        ),
    ):
        raises(NotImplementedError, text, call)
    buffer.low_latency_update_mask_buffer(gone[0], True)  # so it is
    buffer.low_latency_clean_mask_buffer()  # nobody comes back who is gone
    assert mask_of(buffer) == gone


def one_is_silent(group: Any, hooks: bool) -> str:
    """Rank 1 lives and is late. The others wait for one deadline, once, and go on without it; then it comes back."""
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, size = buffer.rank, buffer.group_size
    layer = Layer(buffer, "fp8", hooks)
    before = layer.dispatch(0)[2]
    layer.combine(0, before)
    for step in range(STEPS):
        served = ll_sent(size, step) if step < 3 else without(ll_sent(size, step), [1])
        if rank == 1 and step == 3:
            torch.distributed.barrier(group)  # the others are done
            raises(epd.RankLost, "rank 1 is late, and so lost", lambda: layer.dispatch(step))
            assert mask_of(buffer) == [1], mask_of(buffer)
            break
        layer.checked(step, served)
    assert mask_of(buffer) == [1]
    if rank != 1:
        torch.distributed.barrier(group)
    torch.distributed.barrier(group)
    buffer.low_latency_clean_mask_buffer()
    assert mask_of(buffer) == []
    refused = "handle is of a dispatch before late ranks came back; allowed: handles of later dispatches"
    raises(epd.InvalidArgument, refused, lambda: layer.combine(0, before))  # a rank that was late got zeros
    for step in range(STEPS, 2 * STEPS):
        layer.checked(step, ll_sent(size, step))
    buffer.destroy()
    return "went on"


@contextlib.contextmanager
def raising_once(owner: Any, name: str, error: BaseException, behind: bool = False) -> Any:
    """The next call of that function raises, before it does anything or behind all."""
    real = getattr(owner, name)
    left = [error]

    def raises_once(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options) if behind or not left else None
        if left:
            raise left.pop()
        return result

    setattr(owner, name, raises_once)
    try:
        yield
    finally:
        setattr(owner, name, real)
    assert not left


def interrupted_calls(group: Any, form: str) -> None:
    """Calls of rank 0 end early, and it makes them again; the other ranks notice nothing."""
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, size = buffer.rank, buffer.group_size
    layer = Layer(buffer, form)
    layer.checked(0, ll_sent(size, 0))
    if rank == 0:
        with raising_once(low_latency.LowLatencyMode, "_results", MemoryError()):
            raises(MemoryError, "", lambda: layer.dispatch(1))
    layer.checked(1, ll_sent(size, 1))
    mine = ll_sent(size, 2)[rank]
    buffer.low_latency_update_mask_buffer(size - 1, True)  # so that rows move
    for behind in (False, True):
        stats = torch.zeros(E // size, dtype=torch.int32)
        got, counts, handle, _, hook = buffer.low_latency_dispatch(
            mine.x,
            mine.topk_idx,
            LL_T,
            E,
            return_recv_hook=True,
            cumulative_local_expert_recv_stats=stats,
            **FORMATS[form][0],
        )
        assert hook is not None
        if rank == 0:
            for call in ("fill", "move"):
                owner = Results if call == "fill" else operations
                with raising_once(owner, call, KeyboardInterrupt(), behind):
                    raises(KeyboardInterrupt, "", hook)
                if behind and call == "fill":
                    break  # it has filled all
        threads = [threading.Thread(target=hook) for _ in range(3)]
        for thread in threads:
            thread.start()
        hook()
        for thread in threads:
            thread.join()
        assert torch.equal(stats, counts), "added once"
        served = between(ll_sent(size, 2), lambda source, target: size - 1 not in (source, target))
        check_ll_dispatch(form, rank, size, served, got, counts, handle)
        layer.combine(2, handle)
    buffer.low_latency_update_mask_buffer(size - 1, False)
    layer.checked(3, ll_sent(size, 3))
    buffer.destroy()


def killed_at_any_time(group: Any, seed: int, hooks: bool) -> str:
    """Ranks 1 and 3 are killed in the midst of whatever. Each result is that with the rank, or that without it."""
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, size = buffer.rank, buffer.group_size
    layer = Layer(buffer, "fp8", hooks)
    layer.checked(0, ll_sent(size, 0))
    if rank % 2 == 1:
        delay = random.Random(10 * seed + rank).uniform(0, 0.5) + (0.7 if rank == 3 else 0)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    step, left = 1, 5  # operations after the last loss
    while left > 0:
        step += 1
        all_sent = ll_sent(size, step)
        before = mask_of(buffer)
        got, counts, handle = layer.dispatch(step)
        one_of(
            lambda served: check_ll_dispatch("fp8", rank, size, served, got, counts, handle),
            [without(all_sent, gone) for gone in possible(before, mask_of(buffer))],
        )
        out = layer.combine(step, handle, zero_copy=step % 2 == 0)
        after = mask_of(buffer)
        one_of(
            lambda served: check_combined(rank, served, step, out),
            [without(all_sent, gone) for gone in possible(before, after)],
        )
        left -= after == [1, 3]
    buffer.destroy()
    return "went on"


def possible(before: list[int], after: list[int]) -> list[list[int]]:
    """The sets of ranks that may have been missing, if more and more were lost meanwhile."""
    more = [rank for rank in after if rank not in before]
    return [before + list(some) for n in range(len(more) + 1) for some in itertools.combinations(more, n)]


def one_of(check: Callable[[list[Sent]], None], allowed: list[list[Sent]]) -> None:
    for served in allowed[:-1]:
        with contextlib.suppress(AssertionError):
            return check(served)
    check(allowed[-1])


def engines_die(group: Any, begun: str, stop: str) -> int:
    """All ranks live. Between the files `begun` and `stop` their engines are killed. Everything arrives, and right,
    also if a rank waits for others elsewhere than in the Buffer's calls: behind a combine, or before a hook."""
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
    rank = buffer.rank
    tokens, hidden = 128, 2048  # so that an engine is likely to die within an operation
    made = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (tokens, hidden), generator=made).to(BF16)
    idx = torch.stack([torch.randperm(E, generator=made)[:3] for _ in range(tokens)])
    weights = 2.0 ** torch.randint(-1, 2, (tokens, 3), generator=made).float()
    expected = (x.float() * weights.sum(1, keepdim=True)).to(BF16)
    breaks = 0
    advance = Steps._advance

    def counted(steps: Steps, joined: Any) -> bool:
        nonlocal breaks
        undone = advance(steps, joined)
        breaks += undone
        return undone

    Steps._advance = counted  # type: ignore[method-assign]
    try:
        ends, number = torch.zeros(1), 0
        while ends.item() == 0:
            got, _, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, tokens, E, use_fp8=False, return_recv_hook=True
            )
            assert hook is not None
            if number % 3 == 1:
                dist.all_reduce(torch.zeros(1), group=group)
            hook()
            out, _, _ = buffer.low_latency_combine(got, idx, weights, handle)
            assert torch.equal(out, expected)
            number += 1
            if rank == 0 and number == 10:
                pathlib.Path(begun).touch()
            ends[0] = os.path.exists(stop)
            dist.all_reduce(ends, group=group)
        assert mask_of(buffer) == []
        buffer.destroy()
    finally:
        Steps._advance = advance  # type: ignore[method-assign]
    return breaks


def ends_at_other_times(group: Any) -> None:
    """A rank that has its last result and is destroyed waits for those that have theirs not yet."""
    for turn in range(3):
        buffer = make_buffer(group, low_latency_mode=True, enable_shrink=True)
        rank, size = buffer.rank, buffer.group_size
        layer = Layer(buffer)
        layer.checked(0, ll_sent(size, 0))
        _, _, handle = layer.dispatch(1)
        y = answers(rank, size, 1, handle)
        mine = ll_sent(size, 1)[rank]
        out, _, hook = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, handle, return_recv_hook=True
        )
        if rank == turn:
            time.sleep(0.5)  # the others are in destroy()
            hook()
        buffer.destroy()
        check_combined(rank, ll_sent(size, 1), 1, out)


# ---- waits -----------------------------------------------------------------------------------------


def slow_rank(group: Any, slow: int, shrink: bool, hooks: bool) -> None:
    """Rank `slow` is late to each operation: of all ranks the others have waited longest for it."""
    buffer = make_buffer(group, low_latency_mode=True, enable_shrink=shrink)
    rank, size = buffer.rank, buffer.group_size
    layer = Layer(buffer, hooks=hooks)
    stats = {kind: torch.zeros(size, dtype=torch.int64) for kind in ("dispatch", "combine")}
    layer.combine(9, layer.dispatch(9)[2])  # the ranks wait for each other to join
    for step in range(4):
        for kind in stats:
            before = {each: tensor.clone() for each, tensor in stats.items()}
            torch.distributed.barrier(group)
            if rank == slow:
                time.sleep(0.5)
            if kind == "dispatch":
                _, _, handle = layer.dispatch(step, dispatch_wait_recv_cost_stats=stats[kind])
            else:
                layer.combine(step, handle, combine_wait_recv_cost_stats=stats[kind])
            grown = {each: tensor - before[each] for each, tensor in stats.items()}
            assert not grown["combine" if kind == "dispatch" else "dispatch"].any(), grown
            assert (grown[kind] >= 0).all() and grown[kind][rank] == 0, grown
    before = {each: tensor.clone() for each, tensor in stats.items()}
    layer.combine(5, layer.dispatch(5)[2])
    assert all(torch.equal(before[kind], stats[kind]) for kind in stats)
    if rank != slow:
        assert all(tensor.argmax() == slow for tensor in stats.values()), stats
    buffer.destroy()
