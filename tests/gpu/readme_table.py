#!/usr/bin/env python3
"""Measures the table of README.md ("Performance on GPUs") and prints it as Markdown.

Usage: tests/gpu/readme_table.py BIN [--ranks N] [--iters N] [--json FILE]

BIN holds epbench, epd and epctl: build/release/bin, or bin of what tests/gpu/pack.sh made. MPS must run. The rule for
every figure is in kernels/PERFORMANCE.md, "The rule". --json appends epbench's own output, one object a line.
Exit status: 0 all results were correct, 1 a run failed or a result was wrong.
"""
import argparse
import json
import subprocess
import sys

WAYS = {  # how a caller asks: the options of epbench
    "stream (default)": [],
    "graph": ["--graph"],
}
FEW = ["--layout", "expert", "--max-recv-rows", "64"]
CASES = (  # tokens, payload, options of epbench
    (4096, "fp8", []),
    (4096, "bf16", []),
    (128, "fp8", FEW),
    (128, "bf16", FEW),
    (1, "fp8", ["--layout", "expert"]),
    (1, "bf16", ["--layout", "expert"]),
)


def measure(arguments, tokens, payload, layout, way):
    command = [f"{arguments.bin}/epbench", "--backend", "cuda", "--json", "--check", "one"]
    command += ["--ranks", str(arguments.ranks), "--iters", str(arguments.iters), "--tokens", str(tokens)]
    command += ["--payload", payload, *layout, *WAYS[way]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode != 0 or not all(line["correct"] for line in lines):
        sys.exit(f"failed: {' '.join(command)}\n{run.stdout}{run.stderr}")
    if arguments.json:
        with open(arguments.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = {}  # (operation, tokens): the cells of each way
    empty = []
    for way in WAYS:
        for tokens, payload, layout in CASES:
            for line in measure(arguments, tokens, payload, layout, way):
                if line["op"] == "combine" and payload == "fp8":
                    continue  # combine sends bf16 rows whatever dispatch sent
                pair = line["events_ahead_us"]["p50"]
                name = f"{line['op']} {payload.upper()}", tokens
                rows.setdefault(name, []).extend(line["ahead_us"][which] - pair for which in ("p50", "p99"))
        empty += [line["noop_ahead_us"][which] - pair for which in ("p50", "p99")]
    rows["empty operation", "-"] = empty
    print(f"{line['daemon']}; {line['gpus']} x {line['gpu']}, {line['ranks']} ranks, {line['sms']} SMs\n")
    print("| operation | tokens |" + "".join(f" {way}: p50 | p99 |" for way in WAYS))
    print("|---|---:|" + "---:|---:|" * len(WAYS))
    for (operation, tokens), cells in rows.items():
        print(f"| {operation} | {tokens} |" + "".join(f" {cell:.0f} |" for cell in cells))


if __name__ == "__main__":
    main()
