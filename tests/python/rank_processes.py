"""Rank processes with a gloo process group, which run cases by name. Torch is loaded once, and they are forked."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pathlib
import sys
import tempfile
import traceback
from typing import Any

SECONDS = 60  # of a case
START_SECONDS = 200  # until all have loaded torch, on a machine that has much else to do


def serve(rank: int, size: int, meeting: str, socket: str, path: list[str], pipe: Any) -> None:
    """The life of a rank process."""
    os.environ["EPD_SOCKET"] = socket
    sys.path[:0] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    group = dist.new_group(list(range(size)))
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        if name is None:
            break
        module, function = name.split(".")
        try:
            pipe.send((None, getattr(importlib.import_module(module), function)(group, **arguments)))
        except BaseException:  # noqa: B902
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


class RankProcesses:
    """A process for each rank. `run` gives what each rank returned."""

    def __init__(self, size: int, socket: str, path: list[str]) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="epd-ranks-")
        meeting = str(pathlib.Path(self._folder.name, "meeting"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])  # seconds of each rank's start
        self._ends, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, meeting, socket, path, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        for rank, end in enumerate(self._ends):
            assert end.poll(START_SECONDS), f"rank {rank} does not start"
            assert end.recv() == "ready"

    def run(self, name: str, gone: tuple[int, ...] = (), **arguments: Any) -> list[Any]:
        """name: "module.function" of tests/python, called with the process group. gone: ranks whose processes end
        meanwhile; the processes serve no other run then."""
        for end in self._ends:
            end.send((name, arguments))
        results, failures = [], []
        for rank, end in enumerate(self._ends):
            assert end.poll(SECONDS), f"rank {rank} does not answer"
            try:
                failure, result = end.recv()
                assert rank not in gone, f"rank {rank} has answered {result or failure}"
            except EOFError:
                failure, result = None if rank in gone else "it has ended", None
            results.append(result)
            if failure is not None:
                failures.append(f"rank {rank}: {failure}")
        assert not failures, "\n".join(failures)
        return results

    def stop(self) -> None:
        for end in self._ends:
            try:
                end.send((None, None))
            except OSError:
                print("a rank process has ended", file=sys.stderr)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
