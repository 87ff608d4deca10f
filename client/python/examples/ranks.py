"""Starts the ranks of an example, each in a process of its own."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from typing import Callable, Optional

RunRank = Callable[[int, int, str, Optional[str]], None]  # rank, number of ranks, group's name, socket


def run(description: str, name: str, run_rank: RunRank) -> int:
    """Reads the command line, runs the ranks, and returns the exit status: 0 if every rank has ended well."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("socket", nargs="?", help="the daemon's; default: $EPD_SOCKET")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")  # before attach and before CUDA: neither survives a fork
    arguments = (options.ranks, f"{name}-{os.getpid()}", options.socket)
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(options.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode != 0 for process in ranks))
