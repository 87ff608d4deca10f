"""Memory of torch tensors that groups can bind."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _library


@functools.lru_cache(maxsize=None)
def _allocator() -> Any:
    """libepd's epd_memory_alloc and epd_memory_free, which may be called until the process ends."""
    return torch.cuda.memory.CUDAPluggableAllocator(_library.path, "epd_memory_alloc", "epd_memory_free")


def memory_pool() -> Any:
    """A torch.cuda.MemPool of memory that can be passed on by descriptor. Needs torch 2.5 with CUDA.

        pool = epd.torch.memory_pool()
        with torch.cuda.use_mem_pool(pool):
            recv_x = torch.empty(depth, rows, hidden, dtype=torch.bfloat16, device="cuda")
        bindings = [epd.Binding(epd.Region.RECV_X, None, recv_x)]

    Each of the pool's segments is one allocation, so each tensor lies in one. Keep the pool as long as its
    tensors. Freed segments return to the GPU when the pool dies, after its work, as torch.cuda.empty_cache does.
    What a group has bound stays until the group is left.
    """
    return torch.cuda.MemPool(_allocator().allocator())
