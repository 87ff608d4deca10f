"""Custom operators under torch.compile, on host devices."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from conftest import Daemon, Ranks

torch = pytest.importorskip("torch", reason="torch is not installed (Debian: python3-torch)")
if not hasattr(torch.library, "custom_op"):
    pytest.skip(f"torch {torch.__version__} has no torch.library.custom_op (2.4 has)", allow_module_level=True)

from test_torch import BF16, LAYOUTS, make_tokens, small  # noqa: E402

import epd  # noqa: E402
import epd.torch  # noqa: E402
from epd.torch import ops  # noqa: E402


def layer(x: Any, idx: Any, weights: Any, number: int) -> Any:
    received = torch.ops.epd.dispatch(x, idx, weights, number)
    recv_x, _, _, recv_weights, _, routing = received
    y = recv_x.float() * recv_weights.sum(-1, keepdim=True) * 2
    return torch.ops.epd.combine(y.to(BF16), routing, number, x.shape[0])


def gradients(function: Any, group: epd.Group, number: int, seed: int) -> list[Any]:
    x, idx, weights = make_tokens(group.config, group.rank, seed)
    x.requires_grad_(), weights.requires_grad_()
    out = function(x, idx, weights, number)
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, weights.grad]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fields", LAYOUTS)
def test_compiled_is_eager(daemon: Daemon, fields: dict[str, Any], backend: str) -> None:
    """The compiled layer is the eager one, forward and backward, in one graph."""
    # One rank: torch compiles on one thread at a time, and another rank's would wait for this one's.
    with Ranks(daemon.socket, small(num_ranks=1, **fields, hidden=128, num_handles=8)) as (group,):
        exchange = epd.torch.Exchange(group)
        number = ops.register(exchange)
        assert ops.register(exchange) == number
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
        for seed in range(3):
            eager = gradients(layer, group, number, seed)
            for ours, theirs in zip(eager, gradients(compiled, group, number, seed)):
                assert ours.abs().sum() > 0
                if backend == "aot_eager":
                    assert torch.equal(ours, theirs)
                else:  # it adds up in another order
                    torch.testing.assert_close(ours, theirs)
        torch._dynamo.reset()
        gc.collect()
        assert not ops._routings
        ops.unregister(number)
        del exchange


def test_the_operators_are_sound(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(num_ranks=1, hidden=128)) as (group,):
        exchange = epd.torch.Exchange(group)
        number = ops.register(exchange)
        x, idx, weights = make_tokens(group.config, 0)
        x.requires_grad_()
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.epd.dispatch.default, (x, idx, weights, number), test_utils=checks)
        received = torch.ops.epd.dispatch(x, idx, weights, number)
        y = received[0].detach().requires_grad_()
        torch.library.opcheck(
            torch.ops.epd.combine.default, (y, received[5], number, len(x)), test_utils=checks
        )
        ops.unregister(number)
        del exchange, received


def test_wrong_numbers_are_named(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(num_ranks=1)) as (group,):
        exchange = epd.torch.Exchange(group)
        number = ops.register(exchange)
        x, idx, weights = make_tokens(group.config, 0)
        with pytest.raises(epd.InvalidArgument, match="exchange is 987654; allowed: what register returned"):
            torch.ops.epd.dispatch(x, idx, weights, 987654)
        recv_x, _, _, _, _, routing = torch.ops.epd.dispatch(x, idx, weights, number)
        with pytest.raises(epd.InvalidArgument, match="num_tokens is 3; allowed: 9"):
            torch.ops.epd.combine(recv_x, routing, number, 3)
        value = routing.clone()
        del routing
        gc.collect()
        with pytest.raises(epd.NotFound, match="allowed: what epd::dispatch returned"):
            torch.ops.epd.combine(recv_x, value, number, 9)
        ops.unregister(number)
        for call in (lambda: ops.unregister(number), lambda: torch.ops.epd.dispatch(x, idx, weights, number)):
            with pytest.raises(epd.InvalidArgument, match=f"exchange is {number}; allowed: .*, until unregister"):
                call()
        del exchange


def test_an_exchange_that_only_the_registry_has(daemon: Daemon) -> None:
    with Ranks(daemon.socket, small(num_ranks=1)) as (group,):
        number = ops.register(epd.torch.Exchange(group))
        gc.collect()
        x, idx, weights = make_tokens(group.config, 0)
        assert len(torch.ops.epd.dispatch(x, idx, weights, number)[0]) > 0
        ops.unregister(number)
