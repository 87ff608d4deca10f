"""Dispatch and combine in every layout and payload, bit for bit as the reference says."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
from conftest import Daemon, Ranks, shape
from reference import Inputs, check_dispatch, combined, pack_ue8m0

import epd
from epd.numbers import to_bf16


def make_inputs(config: epd.GroupConfig, seed: int) -> list[Inputs]:
    """Returns inputs of all ranks. Some tokens choose nobody, some the same expert twice; weights and y have few bits."""
    random = np.random.default_rng(seed)
    inputs = []
    for rank in range(config.num_ranks):
        n = config.max_tokens - rank
        idx = random.integers(-1, config.num_experts, (n, config.topk))
        weights = random.integers(1, 9, (n, config.topk)).astype(np.float32) / 8
        scales: Optional[Any] = None
        if config.payload in (epd.Payload.BF16, epd.Payload.FP8_CAST):
            x = to_bf16(random.normal(size=(n, config.hidden)).astype(np.float32))
        else:
            width = config.opaque_bytes or config.hidden
            x = random.integers(0, 0x7F, (n, width)).astype(np.uint8)
        if config.payload == epd.Payload.FP8:
            scales = 2.0 ** random.integers(-3, 4, (n, -(-config.hidden // 128))).astype(np.float32)
            scales = scales.astype(np.float32)
            if config.scale_format == epd.ScaleFormat.UE8M0:
                scales = np.array([pack_ue8m0(row) for row in scales])
        inputs.append(Inputs(x, scales, idx, weights))
    return inputs


def write_inputs(b: Any, given: Inputs) -> None:
    n = len(given.x)
    b.x[:n] = given.x
    if given.x_scales is not None:
        b.x_scales[:n] = given.x_scales
    b.topk_idx[:n] = given.topk_idx
    b.topk_weights[:n] = given.topk_weights


def own_arrays(group: epd.Group, slot: int, row_format: int) -> tuple[Any, epd.Memory]:
    """Arrays like all regions of a slot, and the memory that they are."""
    regions = group.numpy(slot, row_format)
    arrays = {
        name: None if region is None else np.full_like(region, 77)
        for name, region in vars(regions).items()
        if name != "bias"
    }
    bias = tuple(None if region is None else np.full_like(region, 77) for region in regions.bias)
    return SimpleNamespace(**arrays, bias=bias), epd.Memory(**arrays, bias=bias)


def round_trip(
    groups: list[epd.Group],
    slot: int,
    seed: int,
    weighted: bool = False,
    own: bool = False,
    row_format: int = 0,
) -> None:
    config = groups[0].config.with_format(row_format)
    inputs = make_inputs(config, seed)
    given_memory: list[Any] = [
        own_arrays(group, slot, row_format) if own else (None, None) for group in groups
    ]
    memories = [memory for _, memory in given_memory]
    arrays = [mine or group.numpy(slot, row_format) for group, (mine, _) in zip(groups, given_memory)]
    for b, given in zip(arrays, inputs):
        write_inputs(b, given)
    dispatches = [
        group.dispatch(slot, len(given.x), row_format=row_format, memory=memory)
        for group, given, memory in zip(groups, inputs, memories)
    ]
    counts = [dispatch.counts() for dispatch in dispatches]
    random = np.random.default_rng(seed + 1000)
    ys = []
    for group, dispatch, count, b in zip(groups, dispatches, counts, arrays):
        result = dispatch.wait()
        assert result.status == epd.Status.OK and result.failed_rank == -1
        assert count.num_recv_rows == result.num_recv_rows
        assert list(count.expert_counts) == b.expert_counts.tolist()
        assert list(count.rank_offsets) == b.rank_offsets.tolist()
        assert (count.expert_offsets is None) == (config.layout == epd.Layout.COMPACT)
        check_dispatch(config, inputs, group.rank, b, result.num_recv_rows)
        b.y[...] = to_bf16(random.integers(-64, 65, b.y.shape).astype(np.float32))
        ys.append(b.y.copy())
        for bias in b.bias[: config.num_biases]:
            bias[...] = to_bf16(random.integers(-8, 9, bias.shape).astype(np.float32))
    combines = [
        group.combine(slot, dispatch.handle, weighted=weighted, num_biases=config.num_biases, memory=memory)
        for group, dispatch, memory in zip(groups, dispatches, memories)
    ]
    for group, combine, given, b in zip(groups, combines, inputs, arrays):
        combine.wait()
        biases = [bias.copy() for bias in b.bias[: config.num_biases]]
        expected = combined(config, inputs, ys, group.rank, weighted, biases)
        np.testing.assert_array_equal(b.out[: len(given.x)], expected)


PAYLOADS = [
    (epd.Payload.BF16, epd.ScaleFormat.FLOAT32),
    (epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32),
    (epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32_POW2),
    (epd.Payload.FP8_CAST, epd.ScaleFormat.UE8M0),
    (epd.Payload.FP8, epd.ScaleFormat.FLOAT32),
    (epd.Payload.FP8, epd.ScaleFormat.UE8M0),
    (epd.Payload.OPAQUE, epd.ScaleFormat.FLOAT32),
]


@pytest.mark.parametrize("layout", epd.Layout)
@pytest.mark.parametrize("payload, scale_format", PAYLOADS)
def test_layouts_and_payloads(
    daemon: Daemon, layout: epd.Layout, payload: epd.Payload, scale_format: epd.ScaleFormat
) -> None:
    config = shape(
        num_ranks=3,
        num_experts=12,
        max_tokens=9,
        hidden=392,
        topk=4,
        layout=layout,
        payload=payload,
        scale_format=scale_format,
        opaque_bytes=48 if payload == epd.Payload.OPAQUE else 0,
        expert_alignment=8 if layout == epd.Layout.PACKED else 0,
    )
    with Ranks(daemon.socket, config) as groups:
        for slot in range(2):
            round_trip(groups, slot, seed=slot + 1, weighted=slot == 1)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", epd.Layout)
def test_row_formats_of_one_group(daemon: Daemon, layout: epd.Layout, own: bool) -> None:
    config = shape(
        num_ranks=2,
        num_experts=8,
        max_tokens=9,
        hidden=640,
        topk=4,
        layout=layout,
        payload=epd.Payload.FP8_CAST,
        more_formats=[
            epd.RowFormat(),
            epd.RowFormat(epd.Payload.FP8, epd.ScaleFormat.UE8M0),
            epd.RowFormat(epd.Payload.FP8_CAST, epd.ScaleFormat.UE8M0),
        ],
        # An array of the caller's has no columns.
        scale_layout=epd.ScaleLayout.ROW_MAJOR if own else epd.ScaleLayout.COLUMN_MAJOR,
    )
    with Ranks(daemon.socket, config) as groups:
        for i, row_format in enumerate((0, 1, 2, 3, 1, 0)):
            round_trip(groups, i % 2, seed=i + 1, own=own, row_format=row_format)
        group = groups[0]
        assert group.buffers(0).recv_x.format == "B" and group.buffers(0, 1).recv_x.format == "H"
        assert group.buffers(0, 1) is group.buffers(0, 1) is not group.buffers(0)
        assert group.buffers(0, 1).recv_scales is None and group.buffers(0, 0).x_scales is None
        for call in (lambda: group.buffers(0, 4), lambda: group.dispatch(0, 1, row_format=4)):
            with pytest.raises(epd.InvalidArgument, match=r"row_format is 4; allowed: 0 \.\. 3"):
                call()


def test_more_formats_are_checked() -> None:
    def region_bytes(more: list[epd.RowFormat]) -> int:
        return shape(more_formats=more).region_bytes(epd.Region.RECV_SCALES)

    assert region_bytes([]) == 0 and region_bytes([epd.RowFormat(epd.Payload.FP8)]) > 0
    with pytest.raises(epd.InvalidArgument, match=r"more_formats\[0\]\.payload is 3; allowed: 0 \.\. 2"):
        region_bytes([epd.RowFormat(epd.Payload.OPAQUE)])
    with pytest.raises(epd.InvalidArgument, match=r"num_more_formats is 4; allowed: 0 \.\. 3"):
        region_bytes([epd.RowFormat()] * 4)
    with pytest.raises(epd.InvalidArgument, match="row_format is 1; allowed: 0 .. 0"):
        shape().with_format(1)


@pytest.mark.parametrize("layout", epd.Layout)
@pytest.mark.parametrize("payload, scale_format", [p for p in PAYLOADS if p[0].name.startswith("FP8")])
@pytest.mark.parametrize("room", [0, 18])  # the worst case is 27 rows
def test_scales_in_columns_and_ranges_in_one_number(
    daemon: Daemon, layout: epd.Layout, payload: epd.Payload, scale_format: epd.ScaleFormat, room: int
) -> None:
    config = shape(
        num_ranks=3,
        num_experts=6,
        max_tokens=9,
        hidden=640,
        topk=2,
        layout=layout,
        payload=payload,
        scale_format=scale_format,
        max_recv_rows=0 if layout == epd.Layout.PACKED else room,
        scale_layout=epd.ScaleLayout.COLUMN_MAJOR,
        range_format=epd.RangeFormat.ROWS if layout == epd.Layout.COMPACT else epd.RangeFormat.PACKED64,
    )
    with Ranks(daemon.socket, config) as groups:
        scales = groups[0].numpy(0).recv_scales
        rows, words = scales.shape[-2:]
        pitch = -(-rows // 4) * 4
        assert scales.strides[-2:] == (4, 4 * pitch) and pitch * words * 4 % 16 == 0
        assert config.region_bytes(epd.Region.RECV_SCALES) == scales.size // rows * pitch * 4
        round_trip(groups, 1, seed=11, weighted=True)


def test_a_shape_that_has_no_scales_or_ranges(daemon: Daemon) -> None:
    with epd.attach(daemon.socket) as session:
        for field in ("scale_layout", "range_format"):
            with pytest.raises(epd.InvalidArgument, match=f"{field} is 1; allowed: 0 unless"):
                session.join(shape(**{field: 1}))


@pytest.mark.parametrize(
    "fields", [{"index_type": epd.IndexType.INT64}, {"num_biases": 2}, {"max_recv_rows": 15}]
)
def test_other_shapes(daemon: Daemon, fields: dict[str, Any]) -> None:
    config = shape(num_ranks=2, num_experts=8, topk=3, **fields)
    with Ranks(daemon.socket, config) as groups:
        round_trip(groups, 3, seed=7, weighted=True)
        if "max_recv_rows" in fields:
            assert groups[0].numpy(0).recv_x.shape == (15, 128)


def test_a_kept_handle_is_used_again(daemon: Daemon) -> None:
    config = shape(num_ranks=2, num_experts=4, num_handles=1)
    with Ranks(daemon.socket, config) as groups:
        inputs = make_inputs(config, 3)
        for group, given in zip(groups, inputs):
            write_inputs(group.numpy(0), given)
            write_inputs(group.numpy(1), given)
        first = [group.dispatch(0, len(g.x), keep_handle=True) for group, g in zip(groups, inputs)]
        rows = [ticket.wait().num_recv_rows for ticket in first]
        handles = [ticket.handle for ticket in first]
        assert handles[0].kept
        # There is no memory for a second one; the routing serves another slot without counting again.
        with pytest.raises(epd.ResourceExhausted):
            groups[0].dispatch(2, 0, keep_handle=True)
        again = [group.dispatch(1, handle=handle) for group, handle in zip(groups, handles)]
        for group, ticket, expected in zip(groups, again, rows):
            assert ticket.wait().num_recv_rows == expected
            b, old = group.numpy(1), group.numpy(0)
            np.testing.assert_array_equal(b.recv_x[:expected], old.recv_x[:expected])
        for handle in handles:
            handle.release()
            assert not handle.kept
            with pytest.raises(epd.NotFound):
                handle.release()


def test_a_kept_handle_that_is_collected_comes_back(daemon: Daemon) -> None:
    with Ranks(daemon.socket, shape(num_handles=1)) as (group,):
        group.numpy(0).topk_idx[:] = 0
        for _ in range(3):
            ticket = group.dispatch(0, 2, keep_handle=True)
            ticket.wait()
            del ticket


def is_busy(group: epd.Group, slot: int) -> bool:
    try:
        group.noop(slot).wait()
    except epd.WouldBlock:
        return True
    return False


def test_a_kept_handle_comes_back_after_ctrl_c_behind_the_submission(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Ranks(daemon.socket, shape(num_handles=1)) as (group,):
        group.numpy(0).topk_idx[:] = 0
        for slot, name in enumerate(("Handle", "Dispatch")):
            with monkeypatch.context() as patch:
                patch.setattr(epd.group, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    group.dispatch(slot, 2, keep_handle=True)
            # A handle can be released when its dispatch has ended, which is when the slot serves the next one.
            daemon.wait_for(lambda slot=slot: not is_busy(group, slot))
        group.dispatch(2, 2, keep_handle=True).wait()


def test_omitted_weights_and_marked_rows(daemon: Daemon) -> None:
    config = shape(num_ranks=2, num_experts=4)
    with Ranks(daemon.socket, config) as groups:
        for group in groups:
            b = group.numpy(0)
            b.topk_idx[:] = 0
            b.topk_weights[:] = 1
            b.recv_topk_weights[:] = 9
        for ticket in [group.dispatch(0, 3, mark_unused=True, omit_weights=True) for group in groups]:
            ticket.wait()
        b = groups[0].numpy(0)
        assert (b.recv_src[:6, 0] == [0, 0, 0, 1, 1, 1]).all() and (b.recv_src[6:] == -1).all()
        assert (groups[1].numpy(0).recv_topk_idx == -1).all()


def test_training_backward_returns_weights(daemon: Daemon) -> None:
    """dispatch's backward is combine with the gradients of the weights; combine's is dispatch under the
    handle.
    """
    config = shape(num_ranks=2, num_experts=4)
    with Ranks(daemon.socket, config) as groups:
        for group in groups:
            b = group.numpy(0)
            b.topk_idx[:] = [[0, 3]] * 8
            b.topk_weights[:] = 0.5
        forward = [group.dispatch(0, 8) for group in groups]
        for ticket in forward:
            ticket.wait()
        for group in groups:
            b = group.numpy(0)
            b.y[:] = 0
            b.y_weights[:] = np.where(b.recv_topk_idx >= 0, group.rank + 1, 0)
        for ticket in [g.combine(0, t.handle, return_weights=True) for g, t in zip(groups, forward)]:
            ticket.wait()
        for group in groups:
            assert (group.numpy(0).out_weights == [[1, 2]] * 8).all()


def test_weights_return_summed_over_ranks(daemon: Daemon) -> None:
    """Column k of all rows of the token, whichever selections they carry: what DeepEP returns."""
    config = shape(num_ranks=4, num_experts=8, topk=3)
    random = np.random.default_rng(7)
    with Ranks(daemon.socket, config) as groups:
        tokens = [5, 0, 8, 1]
        for group, n in zip(groups, tokens):
            group.numpy(0).topk_idx[:n] = random.integers(-1, config.num_experts, (n, 3))
        forward = [group.dispatch(0, n) for group, n in zip(groups, tokens)]
        for ticket in forward:
            ticket.wait()
        expected = [np.zeros((n, 3), np.float32) for n in tokens]
        for group in groups:  # ascending
            b = group.numpy(0)
            b.y[:] = 0
            b.y_weights[:] = random.standard_normal(b.y_weights.shape, np.float32)
            for row in range(b.rank_offsets[-1]):
                source, token = b.recv_src[row]
                expected[source][token] += b.y_weights[row]
        summed = epd.ReturnWeights.SUM
        for ticket in [g.combine(0, t.handle, return_weights=summed) for g, t in zip(groups, forward)]:
            ticket.wait()
        for group, n, sums in zip(groups, tokens, expected):
            np.testing.assert_array_equal(group.numpy(0).out_weights[:n], sums)
        with pytest.raises(epd.InvalidArgument, match="return_weights is 3; allowed: 0"):
            groups[0].combine(0, forward[0].handle, return_weights=3)  # type: ignore[arg-type]


def test_receive_hooks(daemon: Daemon) -> None:
    config = shape(num_ranks=2, num_experts=4)
    with Ranks(daemon.socket, config) as groups:
        inputs = make_inputs(config, 5)
        for group, given in zip(groups, inputs):
            write_inputs(group.numpy(0), given)
        tickets = [group.dispatch(0, len(g.x), defer_receive=True) for group, g in zip(groups, inputs)]
        for ticket in tickets:
            ticket.wait_sent()
        for group in groups:
            group.numpy(0).x[:] = 0  # it has been read
        for group, ticket in zip(groups, tickets):
            check_dispatch(config, inputs, group.rank, group.numpy(0), ticket.wait().num_recv_rows)
        plain = groups[0].noop(1)
        with pytest.raises(epd.InvalidArgument):
            plain.wait_sent()


@pytest.mark.parametrize("layout", epd.Layout)
def test_arrays_in_place_of_regions(daemon: Daemon, layout: epd.Layout) -> None:
    config = shape(num_ranks=2, num_experts=6, max_tokens=7, hidden=256, topk=3, layout=layout, num_biases=1)
    with Ranks(daemon.socket, config) as groups:
        for slot in range(2):
            round_trip(groups, slot, seed=slot + 30, weighted=slot == 1, own=True)


def test_what_memory_may_be(daemon: Daemon) -> None:
    config = shape(num_ranks=1, num_experts=2, depth=1)
    with pytest.raises(TypeError, match="memory.x is 'text'; allowed: None, an address, or an array"):
        epd.Memory(x="text")
    with pytest.raises(epd.InvalidArgument, match="memory.x has strides"):
        epd.Memory(x=np.zeros((4, 8), np.uint16)[:, ::2])
    with pytest.raises(epd.InvalidArgument, match="memory.recv_x is read-only"):
        epd.Memory(recv_x=bytes(64))
    with pytest.raises(epd.InvalidArgument, match="recv_rows is -1; allowed: 0 .."):
        epd.Memory(recv_rows=-1)
    with Ranks(daemon.socket, config) as (group,):
        with pytest.raises(epd.InvalidArgument, match="memory.recv_scales is given; allowed: NULL"):
            group.dispatch(0, 1, memory=epd.Memory(recv_scales=bytearray(64)))
        group.buffers(0).topk_idx[:2] = memoryview(np.zeros(2, np.int32))
        # A ticket keeps its memory, until its end is taken.
        rows = np.zeros((config.max_tokens, config.hidden), np.uint16)
        ticket = group.dispatch(0, 1, memory=epd.Memory(x=np.full((1, config.hidden), 0x3F80, np.uint16), recv_x=rows))
        ticket.wait()
        assert rows[0].tolist() == [0x3F80] * config.hidden and not rows[1:].any()
        del rows
        lost = np.zeros((config.max_tokens, config.hidden), np.uint16)
        array = weakref.ref(lost)
        ticket = group.dispatch(0, 1, memory=epd.Memory(recv_x=lost))
        del lost
        assert array() is not None
        del ticket
        assert array() is None
