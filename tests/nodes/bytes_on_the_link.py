#!/usr/bin/env python3
"""bytes_on_the_link.py EPBENCH: a row crosses once for each (token, node), and a sum once for each (token, domain).

Exit status: 0 passed, 1 failed, 77 skipped because there can be no nodes here.
"""
import json
import subprocess
import sys

# 16 MiB and more from each node, so that the streams of raw UCX are compared, too.
OPTIONS = "nodes --nodes 2 --ranks-per-node 2 --tokens 1024 --pairs 1 --iters 2 --check one --json".split()


def main():
    done = subprocess.run([sys.argv[1], *OPTIONS], capture_output=True, text=True, timeout=110)
    if "nodes can't be made here: " in done.stderr:
        print("skipped:", done.stderr)
        return 77
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["op"] for report in reports] == ["dispatch", "combine"], done.stdout
    for report in reports:
        print(report["op"], report["link_bytes"], report["link_bytes_over_needed"], report.get("no_raw", "raw UCX too"))
        assert report["correct"] and report["checks"] == 4, report
        assert 1 <= report["link_bytes_over_needed"] <= 1.03, report
        assert ("no_raw" in report) != (report.get("raw_mibps", 0) > 0), report
    return 0


sys.exit(main())
