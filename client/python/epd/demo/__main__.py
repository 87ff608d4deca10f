"""The command line of the demo."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Optional, Union

USAGE = """\
A forward pass through Mixture-of-Experts layers of DeepSeek-V3's shape, on several client processes of one epd
daemon: sigmoid gate with group-limited top-k on hidden states made from a text, FP8 dispatch, low-rank SwiGLU
experts, BF16 combine, two micro-batches so that communication overlaps computation. The checksum of the hidden
states equals that of epd-moe-demo (deploy/demo.sh) with the same options."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m epd.demo", description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--socket", help="attach to the daemon at this socket (default: start one)")
    parser.add_argument("--epd", help="the daemon to start (default: $EPD_DAEMON, else epd in PATH)")
    parser.add_argument("--text", help="the text (default: the shipped one)")
    parser.add_argument("--ranks", type=int, default=4, help="client processes, on devices host:0 and up [4]")
    parser.add_argument("--layers", type=int, default=4, help="MoE layers [4]")
    parser.add_argument("--steps", type=int, default=3, help="forward passes, after a first one [3]")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each rank and pass [128]")
    parser.add_argument("--hidden", type=int, default=7168, help="values per token, a multiple of 16 [7168]")
    parser.add_argument(
        "--experts", type=int, default=256, help="experts, a multiple of --ranks and of 8 [256]"
    )
    parser.add_argument("--topk", type=int, default=8, help="experts per token [8]")
    parser.add_argument("--expert-rank", type=int, default=16, help="rank of the low-rank experts [16]")
    parser.add_argument("--seed", type=int, default=1, help="of the weights [1]")
    options = parser.parse_args()
    for name, low, high, step in (
        ("ranks", 1, 64, 1),
        ("layers", 1, 64, 1),
        ("steps", 1, 10_000, 1),
        ("tokens", 1, 8192, 1),
        ("hidden", 16, 16384, 16),
        ("expert_rank", 4, 256, 4),
        ("experts", 8, 4096, 8),
        ("topk", 1, min(32, options.experts // 2), 1),
    ):
        value = getattr(options, name)
        if not low <= value <= high or value % step != 0:
            allowed = f"{low}..{high}" + (f", a multiple of {step}" if step > 1 else "")
            parser.error(f"{name} is {value}; allowed: {allowed}")
    if options.experts % options.ranks != 0:
        parser.error(f"experts is {options.experts}; allowed: multiples of {options.ranks}, the ranks")
    return options


def read_text(given: Optional[str]) -> bytes:
    """As given, else the text in the wheel, else the one in a checkout."""
    folder = os.path.dirname(os.path.abspath(__file__))
    shipped = os.path.join(folder, "text.txt")
    checkout = os.path.join(folder, "../../../tools/demo/text.txt")
    with open(given or (shipped if os.path.exists(shipped) else checkout), "rb") as file:
        return file.read()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the daemon and the ranks end with this process
    options = parse_options()
    try:
        from .. import Error
        from .daemon import OwnDaemon, daemon_program, end_with
        from .model import Gate, Model
        from .random import mix64
        from .rank import Plan, Rank, Report
        from .text import split_into_pieces
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        print("python -m epd.demo needs numpy: pip install numpy", file=sys.stderr)
        return 1
    model = Model(
        num_ranks=options.ranks,
        num_layers=options.layers,
        hidden=options.hidden,
        num_experts=options.experts,
        topk=options.topk,
        expert_rank=options.expert_rank,
        seed=options.seed,
    )
    try:
        text = read_text(options.text)
    except OSError as error:
        print(f"text is {options.text!r}; allowed: a file that can be read: {error.strerror}", file=sys.stderr)
        return 1
    pieces = split_into_pieces(text)
    if not pieces:
        print(f"the text '{options.text}' has no words", file=sys.stderr)
        return 1
    program = daemon_program(options.epd)
    if options.socket is None and program is None:
        print("no daemon to start: name it by --epd, or one that runs by --socket", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        socket = options.socket
        if socket is None:
            assert program is not None
            try:
                socket = stack.enter_context(OwnDaemon(program, model.num_ranks)).socket
            except (OSError, RuntimeError, Error) as error:
                print(f"starting {program}: {error}", file=sys.stderr)
                return 1
        plan = Plan(model, options.steps + 1, options.tokens, pieces, socket, f"moe-demo-py-{os.getpid()}")
        gates = [Gate(model, layer) for layer in range(model.num_layers)]
        parent = os.getpid()

        def run_rank(rank: int, result: Connection) -> None:
            end_with(parent, signal.SIGKILL)
            try:
                result.send(Rank(plan, rank, gates).run())
            except Exception as error:
                result.send(f"rank {rank}: {type(error).__name__}: {error}")

        reports = run_processes(run_rank, model.num_ranks)
    failures = [report for report in reports if isinstance(report, str)]
    if failures:
        print("\n".join(failures), file=sys.stderr)
        return 1
    done = [report for report in reports if isinstance(report, Report)]
    checksum = 0
    for step in range(plan.passes):
        for report in done:
            checksum = mix64(checksum ^ report.checksums[step])
    slowest = sorted(max(report.seconds[step] for report in done) for step in range(1, plan.passes))
    busy = sum(sum(report.seconds) for report in done)
    print(
        f"{model.num_ranks} ranks, {model.num_layers} layers, {options.steps} steps of {options.tokens} tokens "
        f"a rank; H={model.hidden} E={model.num_experts} K={model.topk}, FP8 dispatch, BF16 combine"
    )
    print(
        f"A step takes {1e3 * slowest[len(slowest) // 2]:.0f} ms (p50) in numpy; "
        f"{100 * sum(report.blocked for report in done) / busy:.0f} % of it is waiting for the other ranks."
    )
    print(
        f"{sum(report.rows for report in done)} rows received. Checksum of the hidden states: {checksum:016x}"
    )
    return 0


def run_processes(body: object, count: int) -> list[Union[object, str]]:
    """body(rank, connection) in a process for each rank, forked before any has attached. What each sent.

    After the first that sends text, which is its failure, or nothing, the others are ended: that text alone.
    """
    context = multiprocessing.get_context("fork")
    processes, ranks = [], {}
    for rank in range(count):
        end, theirs = context.Pipe(duplex=False)
        process = context.Process(target=body, args=(rank, theirs), daemon=True)  # type: ignore[arg-type]
        process.start()
        theirs.close()
        processes.append(process)
        ranks[end] = rank
    reports: dict[int, object] = {}
    failure: Optional[str] = None
    while failure is None and len(reports) < count:
        for ready in wait([end for end, rank in ranks.items() if rank not in reports]):
            rank = ranks[ready]  # type: ignore[index]
            try:
                report = ready.recv()  # type: ignore[union-attr]
            except EOFError:
                report = f"rank {rank} ended without a report"
            reports[rank] = report
            if failure is None and isinstance(report, str):
                failure = report
    for process in processes:
        if failure is not None:
            process.terminate()
        process.join()
    return [failure] if failure is not None else [reports[rank] for rank in range(count)]


if __name__ == "__main__":
    sys.exit(main())
