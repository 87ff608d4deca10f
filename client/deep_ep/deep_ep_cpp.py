"""The names that frameworks import from DeepEP's extension module, beside deep_ep. The Buffer of that module,
which only DeepEP's own Python code calls, is not here."""

from deep_ep import Buffer as _Buffer
from deep_ep import Config, EventHandle, topk_idx_t

get_low_latency_rdma_size_hint = _Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = _Buffer.is_sm90_compiled

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
