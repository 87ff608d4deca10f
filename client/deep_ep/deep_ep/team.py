"""The ranks of a Buffer, over the process group of the framework."""

from __future__ import annotations

from typing import Any, Callable, TypeVar

import epd

from .checks import refuse

T = TypeVar("T")


class Team:
    """A torch.distributed process group of any backend, or an mpi4py communicator."""

    def __init__(self, group: Any, comm: Any) -> None:
        if group is None and comm is None:
            raise refuse("group and comm", "neither", "one of them")
        if group is not None:
            comm = None  # as in DeepEP
        for name, given, needs in (("group", group, "rank"), ("comm", comm, "Get_rank")):
            if given is not None and not hasattr(given, needs):
                kind = "a torch.distributed process group" if name == "group" else "an mpi4py communicator"
                raise refuse(name, repr(given), kind)
        self.group = group
        self._comm = comm
        self.rank: int = group.rank() if comm is None else comm.Get_rank()
        self.size: int = group.size() if comm is None else comm.Get_size()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. Raises Aborted: the process group has failed."""
        try:
            if self._comm is not None:
                gathered: list[Any] = self._comm.allgather(value)
                return gathered
            import torch.distributed

            values: list[Any] = [None] * self.size
            torch.distributed.all_gather_object(values, value, group=self.group)
            return values
        except Exception as error:  # noqa: B902 (of the backend or of MPI, in its words)
            raise epd.Aborted(f"the process group's all_gather failed on rank {self.rank}: {error}") from error

    def make(self, what: str, maker: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Returns maker()'s object here, and its facts about it on every rank. If it raises on a rank, all ranks raise:
        that one its own error, the others Aborted with its text."""
        failure: Any = None
        made: Any = None
        said: Any = None
        try:
            made, said = maker()
        except Exception as error:  # noqa: B902 (it is raised below, when the others know)
            failure = error
        gathered = self.gather((None if failure is None else f"{type(failure).__name__}: {failure}", said))
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame
        for rank, (text, _) in enumerate(gathered):
            if text is not None:
                raise epd.Aborted(f"{what} could not be made on rank {rank}: {text}")
        return made, [told for _, told in gathered]
