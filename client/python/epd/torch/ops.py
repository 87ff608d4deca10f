"""Dispatch and combine as custom operators, for torch.compile. Needs torch 2.4.

    exchange = epd.torch.Exchange(group)
    number = epd.torch.ops.register(exchange)

    @torch.compile
    def layer(x, topk_idx, topk_weights):
        recv_x, scales, recv_idx, recv_weights, counts, routing = torch.ops.epd.dispatch(
            x, topk_idx, topk_weights, number)
        y = experts(recv_x, recv_idx, recv_weights)
        return torch.ops.epd.combine(y, routing, number, x.shape[0])

Shapes are static: received rows have room for the worst case, and rows without a token are zero (topk_idx -1). Both
operators are differentiable with payload BF16. `register` keeps the exchange until `unregister`. `routing` is a number
in host memory that stands for the kept routing; the routing is given back with the tensor's memory.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument, NotFound, Unsupported
from ..types import Layout, Payload, ScaleFormat
from .exchange import Exchange, Received, Routing, _Request

if not hasattr(torch.library, "custom_op"):
    raise Unsupported(f"torch is {torch.__version__}; allowed for custom operators: 2.4 or later")

_exchanges: dict[int, Exchange] = {}
_numbers = itertools.count(1)
_routings: dict[int, Routing] = {}
_routing_numbers = itertools.count(1)


def register(exchange: Exchange) -> int:
    """The number by which operators name an exchange. The exchange, and so its group, is kept until `unregister`."""
    for number, known in _exchanges.items():
        if known is exchange:
            return number
    number = next(_numbers)
    _exchanges[number] = exchange
    return number


def unregister(number: int) -> None:
    """Ends what `register` began."""
    _exchange_of(number)
    del _exchanges[number]


class _RoutingMemory(ctypes.c_int64):
    """Memory of a routing tensor: when it goes, so does the routing."""

    def __del__(self, forget: Any = _routings.pop) -> None:
        forget(self.value, None)


def _routing_tensor(routing: Routing) -> Tensor:
    memory = _RoutingMemory(next(_routing_numbers))
    _routings[memory.value] = routing
    return torch.frombuffer(memory, dtype=torch.int64)


def _routing_of(tensor: Tensor) -> Routing:
    routing = _routings.get(int(tensor))
    if routing is None:
        raise NotFound(f"routing is {int(tensor)}; allowed: what epd::dispatch returned, as long as it lives")
    return routing


def _exchange_of(number: int) -> Exchange:
    exchange = _exchanges.get(number)
    if exchange is None:
        raise InvalidArgument(f"exchange is {number}; allowed: what register returned, until unregister")
    return exchange


def _received_as_tensors(received: Received) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    scales = received.scales
    if scales is None:
        scales = torch.empty(0, dtype=torch.float32, device=received.x.device)
    routing = _routing_tensor(received.routing)
    return received.x, scales, received.topk_idx, received.topk_weights, received.expert_counts, routing


@torch.library.custom_op("epd::dispatch", mutates_args=())
def dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """recv_x, recv_scales ([0] with payload BF16), recv_topk_idx, recv_topk_weights, expert_counts, routing."""
    known = _exchange_of(exchange)
    with torch.no_grad():
        return _received_as_tensors(known.run_dispatch(_Request(topk_idx, None, False, 0), x, topk_weights))


@dispatch.register_fake
def _(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: int) -> tuple[Tensor, ...]:
    known = _exchange_of(exchange)
    config, room = known.group.config, tuple(known._room)
    scales = x.new_empty(0, dtype=torch.float32)
    if config.payload == Payload.FP8_CAST:
        packed = config.scale_format == ScaleFormat.UE8M0
        columns = -(-config.hidden // 512) if packed else -(-config.hidden // 128)
        scales = x.new_empty((*room, columns), dtype=torch.int32 if packed else torch.float32)
    columns = config.topk if config.layout == Layout.COMPACT else 1
    return (
        x.new_empty((*room, x.shape[1]), dtype=known.group.tensors(known.slot).recv_x.dtype),
        scales,
        topk_idx.new_empty((*room, columns)),
        topk_weights.new_empty((*room, columns)),
        x.new_empty(known._local, dtype=torch.int32),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("epd::combine", mutates_args=())
def combine(y: Tensor, routing: Tensor, exchange: int, num_tokens: int) -> Tensor:
    """The sums of rows, [num_tokens, H]. num_tokens is that of the dispatch."""
    known, kept = _exchange_of(exchange), _routing_of(routing)
    if kept.num_tokens != num_tokens:
        raise InvalidArgument(f"num_tokens is {num_tokens}; allowed: {kept.num_tokens}, as of the dispatch")
    with torch.no_grad():
        return known.run_combine(y, kept)


@combine.register_fake
def _(y: Tensor, routing: Tensor, exchange: int, num_tokens: int) -> Tensor:
    return y.new_empty((num_tokens, y.shape[-1]))


@torch.library.custom_op("epd::dispatch_backward", mutates_args=())
def dispatch_backward(
    grad_x: Tensor, grad_weights: Tensor, routing: Tensor, exchange: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """The gradients of x and topk_weights."""
    with torch.no_grad():
        return _exchange_of(exchange).run_combine_weights(grad_x, grad_weights, _routing_of(routing))


@dispatch_backward.register_fake
def _(grad_x: Tensor, grad_weights: Tensor, routing: Tensor, exchange: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    topk = _exchange_of(exchange).group.config.topk
    return grad_x.new_empty((num_tokens, grad_x.shape[-1])), grad_weights.new_empty((num_tokens, topk))


@torch.library.custom_op("epd::combine_backward", mutates_args=())
def combine_backward(grad_out: Tensor, routing: Tensor, exchange: int) -> Tensor:
    """The gradient of y."""
    with torch.no_grad():
        return _exchange_of(exchange).run_dispatch_again(grad_out, _routing_of(routing), None)[0]


@combine_backward.register_fake
def _(grad_out: Tensor, routing: Tensor, exchange: int) -> Tensor:
    known = _exchange_of(exchange)
    return grad_out.new_empty((*known._room, grad_out.shape[-1]))


def _keep_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, _, exchange = inputs
    _exchange_of(exchange)._check_differentiable()
    ctx.exchange = exchange
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(output[5])
    ctx.mark_non_differentiable(output[1], output[2], output[4], output[5])


def _differentiate_dispatch(ctx: Any, grad_x: Tensor, _1: Any, _2: Any, grad_weights: Tensor, *_: Any) -> Any:
    (routing,) = ctx.saved_tensors
    gradients = torch.ops.epd.dispatch_backward(grad_x, grad_weights, routing, ctx.exchange, ctx.num_tokens)
    return gradients[0], None, gradients[1], None


def _keep_combine(ctx: Any, inputs: Any, output: Any) -> None:
    _, routing, exchange, _ = inputs
    _exchange_of(exchange)._check_differentiable()
    ctx.exchange = exchange
    ctx.save_for_backward(routing)


def _differentiate_combine(ctx: Any, grad_out: Tensor) -> Any:
    (routing,) = ctx.saved_tensors
    return torch.ops.epd.combine_backward(grad_out, routing, ctx.exchange), None, None, None


dispatch.register_autograd(_differentiate_dispatch, setup_context=_keep_dispatch)
combine.register_autograd(_differentiate_combine, setup_context=_keep_combine)
