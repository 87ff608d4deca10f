"""Training through deep_ep, as Megatron does it: 4 layers, 3 micro-batches in flight, against the dense model.

    python python_training.py [--ranks R] [--tokens N] [--hidden H]

A process for each rank, on GPUs (in turn, if there are fewer), without GPUs on host devices. Every layer's handles
and rows live from forward to backward. Exit status 0: outputs and gradients of all ranks are those of the dense model.
"""

from __future__ import annotations

import argparse
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from deep_ep.utils.envs import init_dist

LAYERS, BATCHES, STEPS, EXPERTS_PER_RANK, TOPK = 4, 3, 5, 4, 4


class Dispatch(torch.autograd.Function):
    """Tokens to experts. The layout and the rows are made on the Buffer's stream."""

    @staticmethod
    def forward(ctx: Any, buffer: Any, num_experts: int, x: Any, topk_idx: Any, probs: Any) -> Any:
        options = {"async_finish": True, "allocate_on_comm_stream": True}
        per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx, num_experts, previous_event=buffer.capture(), **options
        )
        recv_x, recv_idx, recv_probs, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **options,
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_probs, handle, sum(counts)

    @staticmethod
    def backward(ctx: Any, grad_x: Any, _idx: Any, grad_probs: Any, *_: Any) -> Any:
        buffer = ctx.buffer
        grad, grad_weights, event = buffer.combine(
            grad_x.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return None, None, grad, None, grad_weights


class Combine(torch.autograd.Function):
    """Sums back to tokens."""

    @staticmethod
    def forward(ctx: Any, buffer: Any, y: Any, handle: Any) -> Any:
        out, _, event = buffer.combine(
            y, handle, previous_event=buffer.capture(), async_finish=True, allocate_on_comm_stream=True
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        buffer = ctx.buffer
        grad, *_, event = buffer.dispatch(
            grad_out.contiguous(),
            handle=ctx.handle,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return None, grad, None


def layer(buffer: Any, experts: Any, x: Any, topk_idx: Any, probs: Any) -> Any:
    """x plus the sum over chosen experts of probability * factors of the expert * x."""
    num_experts = experts.shape[0] * buffer.group_size
    recv_x, recv_idx, recv_probs, handle, _ = Dispatch.apply(buffer, num_experts, x, topk_idx, probs)
    # Selections of other ranks' experts have no gradient here: those of all ranks are summed.
    here = (recv_idx >= 0).unsqueeze(-1)
    scale = (experts[recv_idx.clamp(min=0)] * recv_probs.unsqueeze(-1) * here).sum(1)
    y = (recv_x.float() * scale).to(torch.bfloat16)
    return x + Combine.apply(buffer, y, handle)


def dense_layer(experts: Any, x: Any, topk_idx: Any, probs: Any) -> Any:
    here = (topk_idx >= 0).unsqueeze(-1)
    scale = (experts[topk_idx.clamp(min=0)] * probs.unsqueeze(-1) * here).sum(1)
    return x + x * scale


def relative_error(a: Any, b: Any) -> float:
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


def make_batch(seed: int, tokens: int, hidden: int, num_experts: int, device: Any) -> tuple[Any, ...]:
    """x, and for each layer topk_idx and probabilities."""
    made = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> Any:
        return torch.rand(shape, generator=made, device=device, dtype=torch.float32)

    x = (random(tokens, hidden) - 0.5).to(torch.bfloat16)
    idx = random(LAYERS, tokens, num_experts).topk(TOPK, dim=-1).indices
    idx.masked_fill_(random(LAYERS, tokens, TOPK) < 0.05, -1)
    return x, idx, random(LAYERS, tokens, TOPK) / TOPK


def train(rank: int, size: int, group: Any, tokens: int, hidden: int, device: Any) -> float:
    hint = deep_ep.Config(24).get_nvl_buffer_size_hint(hidden * 2, size)
    buffer = deep_ep.Buffer(group, hint, 0, explicitly_destroy=True)
    num_experts = EXPERTS_PER_RANK * size
    made = torch.Generator(device=device).manual_seed(1)
    shape = (LAYERS, num_experts, hidden)
    factors = torch.rand(shape, generator=made, device=device, dtype=torch.float32)
    mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    worst = 0.0
    for step in range(STEPS):
        experts = factors[:, mine].clone().requires_grad_()
        dense = factors.clone().requires_grad_()
        in_flight = []
        for batch in range(BATCHES):
            # Ranks have different numbers of tokens.
            seed, n = 100 * step + 10 * batch + rank, tokens - 3 * rank - batch
            x, idx, probs = make_batch(seed, n, hidden, num_experts, device)
            x.requires_grad_(), probs.requires_grad_()
            out = x
            for number in range(LAYERS):
                out = layer(buffer, experts[number], out, idx[number], probs[number])
            in_flight.append((x, idx, probs, out))
        for x, idx, probs, out in reversed(in_flight):
            upstream = torch.full_like(out, 1.0 / out.shape[0])
            out.backward(upstream)
            x_dense = x.detach().float().requires_grad_()
            probs_dense = probs.detach().clone().requires_grad_()
            expected = x_dense
            for number in range(LAYERS):
                expected = dense_layer(dense[number], expected, idx[number], probs_dense[number])
            expected.backward(upstream.float())
            pairs = ((out, expected), (x.grad, x_dense.grad), (probs.grad, probs_dense.grad))
            worst = max(worst, *(relative_error(a, b) for a, b in pairs))
        assert dense.grad is not None
        dist.all_reduce(dense.grad, group=group)
        worst = max(worst, relative_error(experts.grad, dense.grad[:, mine]))
    buffer.destroy()
    return worst


def run(rank: int, size: int, tokens: int, hidden: int) -> None:
    rank, size, group = init_dist(rank, size)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    worst = train(rank, size, group, tokens, hidden, device)
    what = f"{STEPS} steps, {LAYERS} layers, {BATCHES} batches"
    print(f"rank {rank}: {what}: largest relative error {worst:.4f}", flush=True)
    assert worst < 0.02, "the dense model gives something else"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048 if torch.cuda.is_available() else 32)
    parser.add_argument("--hidden", type=int, default=2048 if torch.cuda.is_available() else 128)
    options = parser.parse_args()
    arguments = (options.ranks, options.tokens, options.hidden)
    torch.multiprocessing.spawn(run, args=arguments, nprocs=options.ranks)
