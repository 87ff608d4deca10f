"""For how long other ranks were waited for, as statistics of the caller."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_tensor, not_served
from .groups import Joined

# DeepEP counts cycles of the GPU's clock. epd measures nanoseconds; this is a clock of 2 GHz, as DeepEP's own
# timeout of 100 s has it (200 * 10^9 cycles).
CYCLES_PER_NS = 2


class WaitStats:
    """Adds what one operation has waited for each rank to a tensor [R] int64.

    On a host device that is this operation alone. A GPU's engine looks every 50 ms: there it is what it has seen since
    the group's last call with such a tensor, whatever operation it was.
    """

    def __init__(self, joined: Joined, stats: Tensor, apart: bool) -> None:
        """apart: the CPU waits for each operation. Otherwise nobody knows when this one begins."""
        self._joined = joined
        self._stats = stats
        self._since = joined.waits_read
        if apart or self._since is None:
            self._since = joined.waits()

    def add(self) -> None:
        """The operation has ended, or a stream waits for it."""
        now = self._joined.waits()
        self._joined.waits_read = now
        assert self._since is not None
        cycles = [CYCLES_PER_NS * (after - before) for after, before in zip(now, self._since)]
        self._stats.add_(torch.tensor(cycles, dtype=torch.int64, device=self._stats.device))


def check_stats(name: str, stats: Tensor, ranks: int, device: torch.device, capturing: bool) -> None:
    check_tensor(name, stats, dtypes=torch.int64, shape=(ranks,), device=device)
    if capturing:
        raise not_served(name, "a tensor while the stream captures a graph", "tensors of calls that no graph has")
