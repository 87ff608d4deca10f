"""One training step of a Mixture-of-Experts layer in torch, against the same layer computed densely.

    python moe_training.py [--ranks R] [SOCKET]

Rank r runs in a process of its own, on GPU r if torch sees GPUs, else on a host device. Dispatch and combine are
differentiable: gradients reach the tokens, the router and the experts. Exit status 0: outputs and gradients are
those of the dense layer.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional

import epd
import epd.torch
import ranks

TOKENS, HIDDEN, INNER, TOPK, EXPERTS_PER_RANK = 32, 128, 64, 2, 4


def expert(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return functional.relu(x @ first) @ second


def choose(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, [n, K]."""
    scores, chosen = (x.float() @ router).softmax(-1).topk(TOPK, dim=-1)
    return chosen.int(), scores


def layer(exchange: epd.torch.Exchange, x: Tensor, router: Tensor, firsts: Tensor, seconds: Tensor) -> Tensor:
    """This rank's tokens through the experts of all ranks. firsts, seconds: those of this rank's experts."""
    received = exchange.dispatch(x, *choose(x, router))
    y = torch.zeros_like(received.x, dtype=torch.float32)
    for number, weights in enumerate(zip(firsts, seconds)):
        row, k = (received.topk_idx == number).nonzero(as_tuple=True)
        scale = received.topk_weights[row, k].unsqueeze(-1)
        y = y.index_add(0, row, expert(received.x[row].float(), *weights) * scale)
    return exchange.combine(y.to(torch.bfloat16), received.routing)


def dense_layer(x: Tensor, router: Tensor, firsts: Tensor, seconds: Tensor) -> Tensor:
    chosen, scores = choose(x, router)
    out = torch.zeros_like(x, dtype=torch.float32)
    for number, weights in enumerate(zip(firsts, seconds)):
        scale = (scores * (chosen == number)).sum(-1, keepdim=True)
        out = out + expert(x.float(), *weights) * scale
    return out


def close(name: str, ours: Optional[Tensor], dense: Optional[Tensor]) -> None:
    assert ours is not None and dense is not None
    error = (ours.detach().float() - dense.detach()).norm() / dense.detach().norm()
    assert error < 0.02, f"{name}: relative error {error:.3f}"


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def run_rank(rank: int, num_ranks: int, name: str, socket: Optional[str]) -> None:
    on_gpu = torch.cuda.is_available()
    gpu = rank % torch.cuda.device_count() if on_gpu else 0
    device: Any = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(gpu)
    torch.set_num_threads(1)
    num_experts = num_ranks * EXPERTS_PER_RANK
    shape = epd.GroupConfig(
        name=name,
        rank=rank,
        num_ranks=num_ranks,
        num_experts=num_experts,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        topk=TOPK,
        num_handles=1,
        timeout_ms=30000,
    )
    torch.manual_seed(1)  # the parameters are the same on all ranks
    router = torch.randn(HIDDEN, num_experts, device=device) * 0.1
    firsts = torch.randn(num_experts, HIDDEN, INNER, device=device) * 0.1
    seconds = torch.randn(num_experts, INNER, HIDDEN, device=device) * 0.1
    torch.manual_seed(100 + rank)
    x = torch.randn(TOKENS - rank, HIDDEN, device=device).to(torch.bfloat16)
    mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    with epd.attach(socket, f"cuda:{gpu}" if on_gpu else None) as session, session.join(shape) as group:
        exchange = epd.torch.Exchange(group)
        ours = leaves(x, router, firsts[mine], seconds[mine])
        out = layer(exchange, *ours)
        out.float().square().sum().backward()
        dense = leaves(x.float(), router, firsts, seconds)
        expected = dense_layer(*dense)
        expected.square().sum().backward()
        close("out", out, expected)
        close("gradient of x", ours[0].grad, dense[0].grad)
        close("gradient of the router", ours[1].grad, dense[1].grad)
        del exchange
    print(f"rank {rank}: output and gradients as the dense layer")


if __name__ == "__main__":
    sys.exit(ranks.run("A training step of a MoE layer in torch.", "moe-training-py", run_rank))
