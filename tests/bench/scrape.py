#!/usr/bin/env python3
"""scrape.py BUILD_DIR [PAIRS]: what reading metrics costs the data plane, on host devices.

One daemon, two ranks that run noops (epbench --op noop), in turn without a reader and with one that reads /metrics
each second. Prints p50 and p99 of every run and the median of the ratios of pairs; and how long epctl status and a
scrape take.
"""
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request


def quantiles(build, socket):
    done = subprocess.run(
        [build / "bin/epbench", "--socket", socket, "--ranks", "2", "--op", "noop", "--iters", "5000", "--json"],
        capture_output=True, text=True, check=True, timeout=300,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    return result["p50_us"], result["p99_us"]


class Reader:
    """Reads each second while it is entered."""

    def __init__(self, url):
        self.url, self.times, self.size = url, [], 0

    def __enter__(self):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def _run(self):
        while not self.stop.wait(1):
            begin = time.monotonic()
            self.size = len(urllib.request.urlopen(self.url, timeout=10).read())
            self.times.append(time.monotonic() - begin)


def times_of(command, count):
    times = []
    for _ in range(count):
        begin = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        times.append(time.monotonic() - begin)
    return times


def port_of(log):
    while True:
        for line in log.read_text().splitlines():
            if "metrics are served" in line:
                return line.split("port=")[1].split()[0]
        time.sleep(0.05)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is below cleans up
    with tempfile.TemporaryDirectory(prefix="epd-scrape-") as directory, contextlib.ExitStack() as at_end:
        work = pathlib.Path(directory)
        with open(work / "log", "w") as log:
            epd = subprocess.Popen(
                [build / "bin/epd", "serve", "--config", os.devnull, "--socket", work / "epd.sock", "--control-socket",
                 work / "control.sock", "--devices.cuda", "none", "--devices.host", "2", "--metrics.listen", "127.0.0.1:0"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
        at_end.callback(epd.wait)
        at_end.callback(epd.terminate)
        reader = Reader(f"http://127.0.0.1:{port_of(work / 'log')}/metrics")
        quantiles(build, work / "epd.sock")  # warm
        ratios = {"p50": [], "p99": []}
        for pair in range(pairs):
            found = {}
            for reads in (False, True) if pair % 2 == 0 else (True, False):
                with reader if reads else contextlib.nullcontext():
                    found[reads] = quantiles(build, work / "epd.sock")
            for i, name in enumerate(ratios):
                ratios[name].append(found[True][i] / found[False][i])
            print(f"without: p50 {found[False][0]:.2f} us, p99 {found[False][1]:.2f} us; "
                  f"with: p50 {found[True][0]:.2f} us, p99 {found[True][1]:.2f} us", flush=True)
        for name, values in ratios.items():
            print(f"{name}: with / without, median of {pairs} pairs: {statistics.median(values):.3f}")
        print(f"a scrape: median {statistics.median(reader.times) * 1e3:.1f} ms, {reader.size} bytes")
        status = times_of([build / "bin/epctl", "--socket", work / "control.sock", "status"], 50)
        print(f"epctl status: median {statistics.median(status) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
