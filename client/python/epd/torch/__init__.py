"""Dispatch and combine on torch tensors, with gradients, on the current stream. Needs torch.

    import epd, epd.torch

    exchange = epd.torch.Exchange(group)
    received = exchange.dispatch(x, topk_idx, topk_weights)    # differentiable in x and topk_weights
    y = experts(received.x, received.topk_idx, received.topk_weights)
    out = exchange.combine(y, received.routing)                # differentiable in y

`Group.tensors` gives the regions themselves. `epd.torch.ops` has dispatch and combine as custom operators for
torch.compile.
"""

from .exchange import Exchange, Received, Routing
from .regions import E4M3

__all__ = ["E4M3", "Exchange", "Received", "Routing"]
