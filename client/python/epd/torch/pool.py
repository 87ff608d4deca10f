"""Memory of torch tensors that groups can use in place."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _library
from ..session import Session


@functools.lru_cache(maxsize=None)
def _allocator() -> Any:
    """libepd's epd_memory_alloc and epd_memory_free, which may be called until the process ends."""
    return torch.cuda.memory.CUDAPluggableAllocator(_library.path, "epd_memory_alloc", "epd_memory_free")


def memory_pool() -> Any:
    """A torch.cuda.MemPool of memory that can be passed on by descriptor. Needs torch 2.5 with CUDA.

        pool = epd.torch.memory_pool()
        with torch.cuda.use_mem_pool(pool):
            recv_x = torch.empty(depth, rows, hidden, dtype=torch.bfloat16, device="cuda")

    Each of the pool's segments is one allocation, so each tensor lies in one. Keep the pool as long as its
    tensors. Freed segments return to the GPU when the pool dies, after its work, as torch.cuda.empty_cache does.
    """
    return torch.cuda.MemPool(_allocator().allocator())


def registered_pool(session: Session, bytes: int, device: Any = None) -> Any:
    """A memory_pool that holds so many bytes, registered in the session.

        pool = epd.torch.registered_pool(session, 2 << 30)
        group = session.join(...)
        with torch.cuda.use_mem_pool(pool):
            x = layer(...)
        group.dispatch(..., memory=epd.Memory(x=x, ...))     # x is not copied

    What is allocated beyond that is torch's other memory: rows there are copied by the first two operations that
    name it. Raises what Session.register raises.
    """
    pool = memory_pool()
    with torch.cuda.use_mem_pool(pool, device):
        reserve = torch.empty(bytes, dtype=torch.uint8, device="cuda" if device is None else device)
    session.register(reserve)
    return pool  # which keeps the reserve's memory for later tensors
