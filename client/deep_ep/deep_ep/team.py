"""The ranks of a Buffer, over the process group of the framework."""

from __future__ import annotations

from typing import Any

from .checks import refuse


class Team:
    """A torch.distributed process group of any backend, or an mpi4py communicator."""

    def __init__(self, group: Any, comm: Any) -> None:
        if (group is None) == (comm is None):
            given = "both" if group is not None else "neither"
            raise refuse("group and comm", given, "one of them")
        self.group = group
        self._comm = comm
        self.rank: int = group.rank() if comm is None else comm.Get_rank()
        self.size: int = group.size() if comm is None else comm.Get_size()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self._comm is not None:
            gathered: list[Any] = self._comm.allgather(value)
            return gathered
        import torch.distributed

        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values
