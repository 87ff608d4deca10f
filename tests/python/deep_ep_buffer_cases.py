"""Cases of test_deep_ep.py with Buffers, for each rank: both modes, ends, wrong arguments."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import time
import traceback
from typing import Any

import deep_ep
import pytest
import torch
from deep_ep_sent import (
    BF16,
    LL_T,
    E,
    H,
    K,
    N,
    check_ll_dispatch,
    check_rows,
    dispatch_sent,
    ll_sent,
    make_buffer,
    raises,
    received_by,
    sent_by,
)

import epd


def both_modes(group: Any) -> None:
    """One Buffer for both modes, as serving engines have it; ranks' choices of -1 only."""
    buffer = make_buffer(group, num_nvl_bytes=1 << 20, num_rdma_bytes=1 << 20, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    for step in range(3):
        all_sent = [sent_by(each, "bf16", step) for each in range(size)]
        expected = received_by(rank, size, all_sent)
        rows, handle = dispatch_sent(buffer, all_sent)
        check_rows(rows, all_sent, expected)
        buffer.clean_low_latency_buffer(LL_T, H, E)
        few = ll_sent(size, step)[rank]
        nobody = torch.full_like(few.topk_idx, -1)
        got, counts, ll_handle, _, _ = buffer.low_latency_dispatch(few.x, nobody, LL_T, E)
        assert not counts.any() and not ll_handle[1].any()
        y = torch.full((E // size, size * LL_T, H), float("nan")).to(BF16)
        out, _, _ = buffer.low_latency_combine(y, nobody, few.topk_weights, ll_handle)
        assert not out.any()
        assert buffer.combine(rows, handle)[0].shape == all_sent[rank].x.shape
    mask = torch.full((size,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    assert not mask.any()
    buffer.low_latency_clean_mask_buffer()
    assert buffer.get_local_buffer_tensor(BF16, use_rdma_buffer=True).zero_().numel() == 1 << 19
    assert buffer.get_local_buffer_tensor(BF16, torch.Size([3, 4])).shape == (3, 4)
    assert buffer.get_comm_stream() is None
    buffer.destroy()


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
    raises(epd.InvalidArgument, "explicitly_destroy=False; allowed: True, or no call", unspoken.destroy)
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
        (
            "x.dtype is torch.float16; allowed: torch.bfloat16",
            lambda: buffer.combine(torch.zeros((len(rows), H), dtype=torch.float16), handle),
        ),
        ("x is a int; allowed: a tensor", lambda: buffer.dispatch(3, **numbers)),
        ("x[1].shape is", lambda: buffer.dispatch((mine.x.to(torch.uint8), mine.x[1:].float()), **numbers)),
        ("x[1].dtype is torch.bfloat16", lambda: buffer.dispatch((mine.x.to(torch.uint8), mine.x), **numbers)),
        ("x[0].dtype is torch.bfloat16; allowed: types of one", lambda: buffer.dispatch((mine.x,) * 2, **numbers)),
        ("x.dtype is torch.complex64", lambda: buffer.dispatch(mine.x.to(torch.complex64), **numbers)),
        ("num_tokens_per_expert is None", lambda: buffer.dispatch(mine.x, **choice)),
        ("topk_weights is None", lambda: buffer.dispatch(mine.x, **numbers, topk_idx=mine.topk_idx)),
        ("topk_idx is None", lambda: buffer.dispatch(mine.x, **numbers, topk_weights=mine.topk_weights)),
        ("is_token_in_rank is a NoneType", lambda: buffer.dispatch(mine.x, num_tokens_per_expert=per_expert)),
        ("expert_alignment is 0", lambda: buffer.dispatch(mine.x, **numbers, expert_alignment=0)),
        ("allowed: None under a handle", lambda: buffer.dispatch(mine.x, handle=handle, **choice)),
        (f"x.shape[0] is 3; allowed: {N}", lambda: buffer.dispatch(mine.x[:3], handle=handle)),
        ("config is a str; allowed: None, or a Config", lambda: buffer.dispatch(mine.x, handle=handle, config="x")),
        ("config is a int; allowed: None, or a Config", lambda: buffer.combine(rows, handle, config=0)),
        (
            "previous_event is a str; allowed: None, or an EventOverlap",
            lambda: buffer.combine(rows, handle, previous_event="x"),
        ),
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
        ("group is 5; allowed: a torch.distributed process group", lambda: deep_ep.Buffer(5)),
        ("num_sms is a; allowed: 1 or more", lambda: deep_ep.Config("a")),
        ("hidden_bytes is x; allowed: a multiple", lambda: deep_ep.Config().get_nvl_buffer_size_hint("x", 2)),
        ("offset is -5", lambda: buffer.get_local_buffer_tensor(BF16, None, -5)),
        ("num_tokens_per_expert is a list", lambda: buffer.dispatch(mine.x, num_tokens_per_expert=[1] * E)),
        (
            f"num_worst_tokens is {1 << 31}",
            lambda: buffer.dispatch(mine.x, **numbers, **choice, num_worst_tokens=1 << 31),
        ),
        ("mask_status.dtype is", lambda: buffer.low_latency_query_mask_buffer(torch.zeros(size))),
    ]
    for text, call in refused:
        raises(epd.InvalidArgument, text, call)
    for again in (copy.copy, copy.deepcopy, pickle.dumps):
        raises(TypeError, "Buffer can't be copied", lambda: again(buffer))
    raises(
        NotImplementedError,
        "use_logfmt is True; epd serves: False",
        lambda: buffer.low_latency_combine(y, *ll, use_logfmt=True),
    )
    # All refusals came before anything was submitted: ranks still agree.
    out, _, hook = buffer.low_latency_combine(y, *ll, return_recv_hook=None)
    assert hook is None and not out.any() and buffer.combine(rows, handle)[0].shape == mine.x.shape
    buffer.destroy()


def names(group: Any) -> None:
    """The daemon's groups are named by $EPD_DEEPEP_NAME, rank 0's counts, or by random numbers."""
    before = set()
    for name, wanted in (("job-7", r"job-7-r0-b\d+"), ("job-7", r"job-7-r0-b\d+"), ("", "deepep-[0-9a-f]{12}")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EPD_DEEPEP_NAME", name)
            buffer = make_buffer(group, low_latency_mode=True)
        mine = ll_sent(buffer.group_size, 0)[buffer.rank]
        for experts in (E, 2 * E):
            buffer.low_latency_dispatch(mine.x, mine.topk_idx, LL_T, experts)
        dispatch_sent(buffer, [sent_by(each, "bf16") for each in range(buffer.group_size)])
        found = [joined.group.config.name for joined in buffer._groups.all()]
        assert re.fullmatch(wanted, found[0][: -len("-low-latency-0")]), found
        assert [each[len(buffer._groups.name) :] for each in found] == ["-low-latency-0", "-low-latency-1", "-normal-0"]
        assert not before & set(found)
        before |= set(found)
        buffer.destroy()


def refused_with(group: Any, name: str, value: str) -> str:
    """The error with which a Buffer is not made while the variable has that value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        try:
            make_buffer(group)
        except epd.Error as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError(f"a Buffer is made with {name}={value}")


def a_rank_has_no_buffer(group: Any) -> str:
    """Then no rank has one, and each knows why."""
    values = {"EPD_SOCKET": "/nonexistent", "EPD_DEEPEP_NAME": "a/b"}
    texts = [
        refused_with(group, name, value if group.rank() == 1 else os.environ.get(name, ""))
        for name, value in values.items()
    ]
    make_buffer(group).destroy()
    return "\n".join(texts)


def it_ends_without_the_others(group: Any) -> None:
    buffer = make_buffer(group)
    session = buffer._groups.session
    gather = torch.distributed.all_gather_object

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    torch.distributed.all_gather_object = fails
    try:
        text = f"all_gather failed on rank {buffer.rank}: Connection closed by peer"
        raises(epd.Aborted, text, buffer.destroy)
    finally:
        torch.distributed.all_gather_object = gather
    raises(epd.InvalidArgument, "the Buffer is destroyed", buffer.destroy)
    raises(epd.InvalidArgument, "", lambda: session.join(epd.GroupConfig(num_ranks=1, num_experts=1, hidden=128)))


def in_a_forked_child(group: Any) -> None:
    """There every call is refused at once, also those that would wait for the other ranks; the parent goes on."""
    buffer = make_buffer(group, low_latency_mode=True)
    rank, size = buffer.rank, buffer.group_size
    all_sent = [sent_by(each, "bf16") for each in range(size)]
    rows, handle = dispatch_sent(buffer, all_sent)
    mine, few = all_sent[rank], ll_sent(size, 0)[rank]
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, E)
    y, _, ll_handle, _, hook = buffer.low_latency_dispatch(
        few.x, few.topk_idx, LL_T, E, use_fp8=False, return_recv_hook=True
    )
    calls = [
        buffer.destroy,
        buffer.get_comm_stream,
        buffer.low_latency_clean_mask_buffer,
        hook,
        lambda: buffer.get_local_buffer_tensor(BF16),
        lambda: buffer.get_dispatch_layout(mine.topk_idx, E),
        lambda: buffer.dispatch(mine.x, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank),
        lambda: buffer.dispatch(mine.x, handle=handle),
        lambda: buffer.combine(rows, handle),
        lambda: buffer.clean_low_latency_buffer(LL_T, H, E),
        lambda: buffer.low_latency_dispatch(few.x, few.topk_idx, LL_T, E),
        lambda: buffer.low_latency_combine(y, few.topk_idx, few.topk_weights, ll_handle),
        lambda: buffer.get_next_low_latency_combine_buffer(ll_handle),
        lambda: buffer.low_latency_update_mask_buffer(0, True),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(size, dtype=torch.int32)),
    ]
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            for call in calls:
                raises(epd.InvalidArgument, f"{os.getppid()}, which attached; allowed: ", call)
            calls.clear()
            del buffer, handle, ll_handle, hook, y, rows, call
            gc.collect()
            failed = 0
        except BaseException:  # noqa: B902
            traceback.print_exc()
        finally:
            os._exit(failed)
    assert ended(child) == 0
    hook()
    assert buffer.combine(rows, handle)[0].shape == mine.x.shape
    buffer.destroy()


def ended(child: int) -> int:
    """The exit code of a child process, which ends soon."""
    for _ in range(2000):
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    raise AssertionError(f"the child goes on: {os.waitpid(child, 0)}")


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
