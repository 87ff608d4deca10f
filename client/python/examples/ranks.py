"""Starts the ranks of an example, each in a process of its own."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from typing import Any, Callable, Optional

import epd

RunRank = Callable[[int, int, str, Optional[str]], None]  # rank, number of ranks, group's name, socket


def run(description: str, name: str, run_rank: RunRank) -> int:
    """Reads the command line, runs the ranks, and returns the exit status: 0 if every rank has ended well."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=number_of_ranks, default=2)
    parser.add_argument("socket", nargs="?", help="the daemon's; default: $EPD_SOCKET")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")  # before attach and before CUDA: neither survives a fork
    arguments = (options.ranks, f"{name}-{os.getpid()}", options.socket)
    ranks = [context.Process(target=report, args=(run_rank, rank, *arguments)) for rank in range(options.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode != 0 for process in ranks))


def report(run_rank: RunRank, rank: int, *arguments: Any) -> None:
    """Runs a rank. What the daemon or the machine lacks is a line; anything else is a defect and a traceback."""
    try:
        run_rank(rank, *arguments)
    except (epd.Error, OSError) as error:
        sys.exit(f"rank {rank}: {error}")


def number_of_ranks(text: str) -> int:
    """The number of ranks on the command line."""
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"ranks is {text}; allowed: 1 .. 1024")
    return int(text)
