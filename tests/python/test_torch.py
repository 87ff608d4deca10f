"""torch tensors: regions, dispatch and combine in every layout, gradients against a dense model, lifetimes."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any, Callable

import numpy as np
import pytest
from conftest import Daemon, Ranks, shape

torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")

from reference import Inputs, check_dispatch, combined  # noqa: E402

import epd  # noqa: E402
import epd.torch  # noqa: E402
from epd._handles import is_member  # noqa: E402

BF16 = torch.bfloat16


def on_ranks(groups: list[epd.Group], work: Callable[[epd.Group], Any]) -> list[Any]:
    """Returns the result of each rank's thread."""
    results: list[Any] = [None] * len(groups)

    def run(rank: int) -> None:
        try:
            results[rank] = work(groups[rank])
        except BaseException as error:  # noqa: B902
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def bits(tensor: Any) -> np.ndarray[Any, Any]:
    """bf16 as uint16, e4m3 as uint8, others as they are: what the reference takes."""
    if tensor.dtype == BF16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == epd.torch.E4M3:
        return tensor.detach().view(torch.uint8).numpy()
    return tensor.detach().numpy()


def make_tokens(config: epd.GroupConfig, rank: int, seed: int = 1) -> tuple[Any, Any, Any]:
    """x, topk_idx, topk_weights of a rank. Some tokens choose nobody, some the same expert twice."""
    made = torch.Generator().manual_seed(seed * 100 + rank)
    n = config.max_tokens - rank
    x = torch.randn(n, config.hidden, generator=made).to(BF16)
    idx = torch.randint(-1, config.num_experts, (n, config.topk), generator=made, dtype=torch.int64)
    if config.index_type == epd.IndexType.INT32:
        idx = idx.int()
    return x, idx, torch.randint(1, 9, (n, config.topk), generator=made) / 8


def of_reference(tokens: list[tuple[Any, Any, Any]]) -> list[Inputs]:
    return [Inputs(bits(x), None, idx.numpy(), weights.numpy()) for x, idx, weights in tokens]


LAYOUTS = [
    {"layout": epd.Layout.COMPACT},
    {"layout": epd.Layout.PACKED, "expert_alignment": 8},
    {"layout": epd.Layout.EXPERT},
]
PAYLOADS = [
    (epd.Payload.BF16, epd.ScaleFormat.FLOAT32),
    (epd.Payload.FP8_CAST, epd.ScaleFormat.FLOAT32),
    (epd.Payload.FP8_CAST, epd.ScaleFormat.UE8M0),
]


def small(**fields: Any) -> epd.GroupConfig:
    values: dict[str, Any] = {"num_ranks": 2, "num_experts": 8, "topk": 3, "max_tokens": 9, "hidden": 256}
    return shape(**{**values, "num_handles": 4, **fields})


# ---- regions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [epd.Payload.BF16, epd.Payload.FP8, epd.Payload.OPAQUE])
def test_regions_are_the_groups_memory(daemon: Daemon, payload: epd.Payload) -> None:
    opaque = 32 if payload == epd.Payload.OPAQUE else 0
    config = small(num_ranks=1, payload=payload, opaque_bytes=opaque, index_type=epd.IndexType.INT64)
    with Ranks(daemon.socket, config) as (group,):
        b, arrays = group.tensors(0), group.numpy(0)
        assert group.tensors(0) is b
        assert b.y.dtype == BF16 and b.topk_idx.dtype == torch.int64 and b.recv_src.dtype == torch.int32
        row_type = {0: BF16, 2: epd.torch.E4M3, 3: torch.uint8}[payload]
        assert b.recv_x.dtype == row_type
        for name, tensor in vars(b).items():
            if isinstance(tensor, torch.Tensor):
                assert tuple(tensor.shape) == getattr(arrays, name).shape
                assert tensor.data_ptr() == getattr(arrays, name).ctypes.data
        b.topk_weights[2, 1] = 0.5
        assert arrays.topk_weights[2, 1] == 0.5
        del b, arrays, tensor


def test_a_tensor_keeps_the_membership(daemon: Daemon) -> None:
    session = epd.attach(daemon.socket)
    group = session.join(small(num_ranks=1))
    view = group.tensors(1).y[3:5].float()  # a copy keeps nothing
    row = group.tensors(1).y[3]
    row[0] = 7
    assert not group.leave() and not session.detach()
    with pytest.raises(epd.InvalidArgument, match="has been left"):
        group.tensors(1)
    assert is_member(group._address) and row[0] == 7 and view.shape == (2, 256)
    part = row[:4].view(torch.int16)
    del row
    gc.collect()
    assert is_member(group._address) and part[0] == 0x40E0
    del part
    assert not is_member(group._address) and group.leave()


def test_forgotten_groups_are_left(daemon: Daemon) -> None:
    session = epd.attach(daemon.socket)
    group = session.join(small(num_ranks=1))
    address = group._address
    exchange = epd.torch.Exchange(group)
    received = exchange.dispatch(*make_tokens(group.config, 0)[:2])
    del group, exchange
    gc.collect()
    assert is_member(address)  # the routing's handle
    del received
    gc.collect()
    assert not is_member(address)


# ---- round trips -----------------------------------------------------------------------------------


class ReceivedArrays:
    """The arrays that the reference compares."""

    def __init__(self, group: epd.Group, received: epd.torch.Received) -> None:
        regions = group.numpy(0)
        self.recv_x = bits(received.x)
        self.recv_scales = None if received.scales is None else received.scales.numpy()
        self.recv_src = received.src.numpy()
        self.recv_topk_idx = received.topk_idx.numpy()
        self.recv_topk_weights = received.topk_weights.numpy()
        self.expert_counts = received.expert_counts.numpy()
        self.rank_offsets = regions.rank_offsets
        self.source_ranges = regions.source_ranges


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("payload, scale_format", PAYLOADS)
@pytest.mark.parametrize("fields", LAYOUTS)
def test_round_trips(
    daemon: Daemon, fields: dict[str, Any], payload: epd.Payload, scale_format: epd.ScaleFormat, exact: bool
) -> None:
    config = small(payload=payload, scale_format=scale_format, num_biases=1, **fields)
    with Ranks(daemon.socket, config) as groups:
        tokens = [make_tokens(config, rank) for rank in range(2)]
        inputs = of_reference(tokens)
        exchanges = [epd.torch.Exchange(group) for group in groups]

        def dispatch(group: epd.Group) -> Any:
            # Garbage of an operation before, which must not show.
            b = group.tensors(0)
            for region in (b.recv_x, b.recv_topk_weights, b.recv_topk_idx, b.recv_src, b.y):
                region.view(torch.uint8).fill_(0x7F)
            x, idx, weights = tokens[group.rank]
            received = exchanges[group.rank].dispatch(x.clone(), idx, weights, exact=exact)
            rows = received.routing.num_rows
            if not exact or config.layout == epd.Layout.EXPERT:
                assert rows is None and received.x.shape == b.recv_x.shape
                rows = int(b.rank_offsets[-1]) if config.layout == epd.Layout.COMPACT else None
                filled = (received.src[..., 0] >= 0).unsqueeze(-1)
                assert not (bits(received.x).astype(np.uint16) * (~filled).numpy()).any()
                assert not (received.topk_weights * ~filled).any()
                assert (received.topk_idx.masked_fill(filled, -1) == -1).all()
            if rows is None:
                rows = int(b.expert_counts.sum() if config.layout == epd.Layout.EXPERT else b.expert_offsets[-1])
            check_dispatch(config, inputs, group.rank, ReceivedArrays(group, received), rows)
            return received

        received = on_ranks(groups, dispatch)
        made = torch.Generator().manual_seed(5)
        shapes = [(*each.x.shape[:-1], config.hidden) for each in received]
        ys = [torch.randint(-64, 65, size, generator=made).to(BF16) for size in shapes]
        biases = [torch.randint(-8, 9, (len(x), config.hidden), generator=made).to(BF16) for x, _, _ in tokens]
        for weighted in (False, True):
            outs = on_ranks(
                groups,
                lambda group: exchanges[group.rank].combine(
                    ys[group.rank],
                    received[group.rank].routing,
                    topk_weights=tokens[group.rank][2] if weighted else None,
                    biases=biases[group.rank : group.rank + 1],
                ),
            )
            for rank, out in enumerate(outs):
                expected = combined(config, inputs, [bits(y) for y in ys], rank, weighted, [bits(biases[rank])])
                np.testing.assert_array_equal(bits(out), expected)
        del exchanges, received


def test_fp8_with_scales_of_any_strides(daemon: Daemon) -> None:
    config = small(payload=epd.Payload.FP8)
    with Ranks(daemon.socket, config) as groups:
        codes = (torch.arange(9 * 256) % 120).view(9, 256).to(torch.uint8).view(epd.torch.E4M3)
        scales = torch.arange(18, dtype=torch.float32).view(2, 9).T  # column-major
        idx = torch.tensor([[0, 4, -1]] * 9, dtype=torch.int32)

        def dispatch(group: epd.Group) -> Any:
            return epd.torch.Exchange(group).dispatch(codes, idx, x_scales=scales)

        for received in on_ranks(groups, dispatch):
            assert received.x.dtype == epd.torch.E4M3 and received.x.shape == (18, 256)
            assert torch.equal(received.x.view(torch.uint8)[:9], codes.view(torch.uint8))
            assert torch.equal(received.scales, scales.repeat(2, 1))
            assert not received.topk_weights.any()
        del received


def test_a_view_that_negates_is_sent_with_its_sign(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(num_ranks=1)) as (group,):
        exchange = epd.torch.Exchange(group)
        x, idx, weights = make_tokens(group.config, 0)
        received = exchange.dispatch(torch._neg_view(x), idx, torch._neg_view(weights))
        expected = exchange.dispatch(-x, idx, -weights)
        assert received.x.shape[0] > 0
        assert torch.equal(received.x, expected.x) and torch.equal(received.topk_weights, expected.topk_weights)
        out = exchange.combine(torch._neg_view(expected.x), received.routing)
        assert torch.equal(out, exchange.combine(-expected.x, expected.routing))
        del exchange, received, expected


# ---- gradients -------------------------------------------------------------------------------------


def run_layer(exchange: Any, tokens: list[Any], experts: list[Any], combine_weighted: bool, exact: bool) -> Any:
    """A MoE layer whose expert e multiplies by experts[e]; the output's products with fixed numbers, summed."""
    x, idx, weights = tokens
    config, rank = exchange.group.config, exchange.group.rank
    local = config.num_experts // config.num_ranks
    received = exchange.dispatch(x, idx, weights, exact=exact)
    factors = torch.stack([experts[rank * local + e] for e in range(local)])
    rows = received.x.float()
    if config.layout == epd.Layout.COMPACT:
        chosen = received.topk_idx.clamp(min=0).long()
        if combine_weighted:  # the combine multiplies by the sum of weights: the experts must agree
            y = rows * factors[0]
        else:
            scale = (factors[chosen] * received.topk_weights.unsqueeze(-1)).sum(1)
            y = rows * scale
    else:
        chosen = received.topk_idx[..., 0].clamp(min=0).long()
        y = rows * factors[chosen]
        if not combine_weighted:
            y = y * received.topk_weights
    out = exchange.combine(y.to(BF16), received.routing, topk_weights=weights if combine_weighted else None)
    return out


def dense_layer(tokens: list[Any], experts: list[Any]) -> Any:
    x, idx, weights = tokens
    out = torch.zeros(x.shape, dtype=torch.float32)
    for k in range(idx.shape[1]):
        chosen = idx[:, k].long()
        factor = torch.stack(experts)[chosen.clamp(min=0)] * (chosen >= 0).unsqueeze(-1)
        out = out + x.float() * factor * weights[:, k : k + 1]
    return out


@pytest.mark.parametrize("combine_weighted", [False, True])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("fields", LAYOUTS)
def test_gradients_are_those_of_a_dense_layer(
    daemon: Daemon, fields: dict[str, Any], exact: bool, combine_weighted: bool
) -> None:
    config = small(**fields, topk=3, hidden=128)
    same = combine_weighted and config.layout == epd.Layout.COMPACT

    def leaves(rank: int) -> tuple[list[Any], list[Any]]:
        made = torch.Generator().manual_seed(rank)
        x, _, weights = make_tokens(config, rank)
        x = torch.randint(-4, 5, x.shape, generator=made).to(BF16)
        # Different experts for each token: one expert twice has one row, whose weight is a sum.
        idx = torch.stack([torch.randperm(9, generator=made)[:3] - 1 for _ in range(len(x))]).int()
        known = torch.Generator().manual_seed(77)
        experts = [torch.randint(1, 4, (128,), generator=known).float() for _ in range(8)]
        if same:
            experts = [experts[0].clone() for _ in range(8)]
        return [x.requires_grad_(), idx, weights.requires_grad_()], [e.requires_grad_() for e in experts]

    def train(group: epd.Group) -> None:
        exchange = epd.torch.Exchange(group)
        for step in range(3):  # handles come back
            tokens, experts = leaves(group.rank)
            out = run_layer(exchange, tokens, experts, combine_weighted, exact)
            upstream = torch.randint(-2, 3, out.shape, generator=torch.Generator().manual_seed(step)).to(BF16)
            out.backward(upstream)
            dense_tokens, dense_experts = leaves(group.rank)
            expected = dense_layer(dense_tokens, dense_experts)
            torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.25)
            expected.backward(upstream.float())
            torch.testing.assert_close(
                tokens[0].grad.float(), dense_tokens[0].grad.float(), rtol=0.03, atol=0.25
            )
            torch.testing.assert_close(tokens[2].grad, dense_tokens[2].grad, rtol=0.03, atol=1.0)
        del exchange, out

    with Ranks(daemon.socket, config) as groups:
        on_ranks(groups, train)


@pytest.mark.parametrize("fields", LAYOUTS)
def test_gradients_of_the_experts(daemon: Daemon, fields: dict[str, Any]) -> None:
    """The experts' gradients, summed over ranks, are those of the dense layer over all tokens."""
    config = small(**fields, hidden=128)

    def train(group: epd.Group) -> Any:
        exchange = epd.torch.Exchange(group)
        x, idx, weights = make_tokens(config, group.rank)
        idx = torch.stack([torch.arange(3) + t % 6 for t in range(len(x))]).int()
        experts = [torch.full((128,), 1.0 + e).requires_grad_() for e in range(8)]
        run_layer(exchange, [x, idx, weights], experts, False, False).float().sum().backward()
        dense = [torch.full((128,), 1.0 + e).requires_grad_() for e in range(8)]
        dense_layer([x, idx, weights], dense).sum().backward()
        zero = torch.zeros(128)
        return [[zero if e.grad is None else e.grad for e in each] for each in (experts, dense)]

    with Ranks(daemon.socket, config) as groups:
        mine, dense = zip(*on_ranks(groups, train))
        for e in range(8):
            total = sum(each[e] for each in mine)
            torch.testing.assert_close(total, sum(each[e] for each in dense), rtol=0.02, atol=0.2)


@pytest.mark.parametrize("exact", [True, False])
def test_threads_that_share_a_slot_get_their_own_rows(daemon: Daemon, exact: bool) -> None:
    """Rows of one call were those of another thread's."""
    config = small(num_ranks=1, topk=1, num_handles=16, hidden=128)
    wrong: list[Any] = []

    def train(exchange: epd.torch.Exchange, number: int) -> None:
        x = torch.full((8, 128), float(number)).to(BF16).requires_grad_()
        idx = (torch.arange(8) % 8).reshape(8, 1).int()
        try:
            for _ in range(60):
                received = exchange.dispatch(x, idx, exact=exact)
                out = exchange.combine(received.x, received.routing)
                (grad,) = torch.autograd.grad(out, x, torch.full_like(out, float(-number)))
                if not ((out == number).all() and (grad == -number).all()):
                    wrong.append((number, out, grad))
        except epd.Error as error:
            wrong.append((number, error))

    with Ranks(daemon.socket, config) as (group,):
        exchanges = [epd.torch.Exchange(group), epd.torch.Exchange(group)]
        threads = [threading.Thread(target=train, args=(exchanges[i % 2], i + 1)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert not wrong, wrong[0]
        del exchanges


def test_many_layers_and_micro_batches_in_flight(daemon: Daemon) -> None:
    """Forward passes of 4 layers and 3 micro-batches, then their backward passes, last one first."""
    config = small(num_handles=12, hidden=128)

    def train(group: epd.Group) -> int:
        exchanges = epd.torch.Exchange(group)
        losses, inputs = [], []
        for batch in range(3):
            x, idx, weights = make_tokens(config, group.rank, seed=batch)
            inputs.append(x.requires_grad_())
            for layer in range(4):
                received = exchanges.dispatch(x, (idx + layer) % 8, weights)
                scale = received.topk_weights.sum(1, keepdim=True)
                x = exchanges.combine((received.x.float() * scale).to(BF16), received.routing)
            losses.append((x.float().sum(), weights.sum(1, keepdim=True) ** 4))
        del received
        for (loss, factor), x in reversed(list(zip(losses, inputs))):
            loss.backward()
            torch.testing.assert_close(x.grad.float(), factor.expand_as(x), rtol=0.05, atol=0.05)
        with pytest.raises(epd.ResourceExhausted):
            kept = [exchanges.dispatch(x.detach(), idx, weights) for _ in range(13)]
            assert not kept
        return len(losses)

    with Ranks(daemon.socket, config) as groups:
        assert on_ranks(groups, train) == [3, 3]


# ---- threads, errors -------------------------------------------------------------------------------


def test_groups_in_threads(daemon: Daemon) -> None:
    """Four threads, each with a group of its own on one session: losses do not mix."""
    session = epd.attach(daemon.socket)

    def train(number: int) -> None:
        group = session.join(small(num_ranks=1, hidden=128))
        exchange = epd.torch.Exchange(group)
        for step in range(5):
            x = torch.full((8, 128), float(number + 1)).to(BF16).requires_grad_()
            idx = torch.tensor([[step % 8, -1, -1]] * 8, dtype=torch.int32)
            received = exchange.dispatch(x, idx, torch.ones(8, 3))
            out = exchange.combine(received.x * 2, received.routing)
            assert torch.equal(out, x * 2)
            out.float().sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, 2))

    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            train(number)
        except BaseException as error:  # noqa: B902
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    session.detach()


def test_wrong_tensors_are_named(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(num_ranks=1)) as (group,):
        exchange = epd.torch.Exchange(group)
        x, idx, weights = make_tokens(group.config, 0)
        cases = [
            ((x.float(), idx), {}, "x.dtype is torch.float32; allowed: torch.bfloat16"),
            ((x[:, :128], idx), {}, r"x.shape is \[9, 128\]; allowed: \[any, 256\]"),
            ((x.numpy if False else 3, idx), {}, "x is a int; allowed: a tensor"),
            ((torch.cat([x, x]), idx), {}, r"x.shape\[0\] is 18; allowed: 0 .. 9, the group's max_tokens"),
            ((x, idx.long()), {}, "topk_idx.dtype is torch.int64; allowed: torch.int32, as the group's index_type is"),
            ((x, idx[:5]), {}, r"topk_idx.shape is \[5, 3\]; allowed: \[9, 3\]"),
            ((x, idx, weights[:, :2]), {}, r"topk_weights.shape is \[9, 2\]; allowed: \[9, 3\]"),
            ((x, idx), {"x_scales": weights}, "x_scales is a tensor; allowed: None with payload BF16"),
        ]
        for arguments, keywords, text in cases:
            with pytest.raises(epd.InvalidArgument, match=text):
                exchange.dispatch(*arguments, **keywords)
        received = exchange.dispatch(x, idx, weights)
        rows = received.x.shape[0]
        with pytest.raises(epd.InvalidArgument, match=rf"y.shape is \[{rows + 1}, 256\]; allowed: \[{rows}, 256\]"):
            exchange.combine(torch.zeros(rows + 1, 256, dtype=BF16), received.routing)
        with pytest.raises(epd.InvalidArgument, match="biases is 1 tensors; allowed: at most 0"):
            exchange.combine(received.x, received.routing, biases=[x])
        with pytest.raises(TypeError, match="routing is None; allowed: Received.routing"):
            exchange.combine(received.x, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="biases is None; allowed: a tuple of tensors"):
            exchange.combine(received.x, received.routing, biases=None)  # type: ignore[arg-type]
        exchange.check()
        del exchange, received


def test_gradients_of_gradients_are_refused(daemon: Daemon) -> None:
    """They would be zero without an error."""
    with Ranks(daemon.socket, small(num_ranks=1)) as (group,):
        exchange = epd.torch.Exchange(group)
        x, idx, weights = make_tokens(group.config, 0)
        x = x.requires_grad_()
        received = exchange.dispatch(x, idx, weights)
        out = exchange.combine(received.x * received.x, received.routing)
        (gradient,) = torch.autograd.grad(out.float().pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.float().pow(2).sum().backward()
        exchange.check()
        del exchange, received


def test_a_module_with_an_exchange_is_not_copied(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(num_ranks=1)) as (group,):
        module = torch.nn.Linear(2, 2)
        module.exchange = epd.torch.Exchange(group)
        with pytest.raises(TypeError, match="Exchange can't be copied or pickled"):
            copy.deepcopy(module)
        gc.collect()
        assert is_member(group._address)
        module.exchange.check()
        del module


def test_no_gradients_through_a_cast(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(num_ranks=1, payload=epd.Payload.FP8_CAST)) as (group,):
        exchange = epd.torch.Exchange(group)
        x, idx, weights = make_tokens(group.config, 0)
        with pytest.raises(epd.InvalidArgument, match="payload is FP8_CAST; allowed: BF16 for gradients"):
            exchange.dispatch(x.requires_grad_(), idx, weights)
        with torch.no_grad():
            exchange.dispatch(x, idx, weights)
        del exchange


def test_no_tokens(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(hidden=128)) as groups:

        def step(group: epd.Group) -> Any:
            exchange = epd.torch.Exchange(group)
            x = torch.zeros(0, 128, dtype=BF16).requires_grad_()
            received = exchange.dispatch(x, torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 3))
            out = exchange.combine(received.x, received.routing)
            out.sum().backward()
            return received.x.shape[0], tuple(out.shape), tuple(x.grad.shape)

        assert on_ranks(groups, step) == [(0, (0, 128), (0, 128))] * 2


def test_a_break_reaches_the_caller(own_daemon: Callable[..., Daemon]) -> None:
    with Ranks(own_daemon().socket, small()) as groups:
        exchange = epd.torch.Exchange(groups[0])
        groups[1].leave()
        x, idx, weights = make_tokens(groups[0].config, 0)
        with pytest.raises(epd.RankLost) as caught:
            exchange.dispatch(x, idx, weights)
        assert caught.value.rank == 1
        with pytest.raises(epd.RankLost):
            exchange.check()
        del exchange
