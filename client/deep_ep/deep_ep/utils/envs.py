"""Starting a test's process group."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Joins the default process group on this node; returns rank, size and a group of all.

    The backend is NCCL where each rank has a GPU, else gloo: NCCL takes no two ranks on one GPU. $MASTER_ADDR and
    $MASTER_PORT say where (127.0.0.1:8361). On GPUs the process uses GPU local_rank, in turn if there are fewer, and
    makes bf16 tensors there by default.
    """
    on_gpus = torch.cuda.is_available()
    gpus = torch.cuda.device_count() if on_gpus else 0
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "8361"))
    if on_gpus:
        torch.cuda.set_device(local_rank % gpus)
    dist.init_process_group(
        backend="nccl" if gpus >= num_local_ranks else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_local_ranks,
        rank=local_rank,
    )
    if on_gpus:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("cuda")
    torch.manual_seed(seed + local_rank)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(num_local_ranks)))
