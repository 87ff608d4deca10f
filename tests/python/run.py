"""Runs pytest for ctest. Exits with 77, shown as skipped, where a tool is missing or all tests were skipped."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

SKIPPED = 77


def main() -> int:
    for module in ("pytest", "numpy"):
        if importlib.util.find_spec(module) is None:
            print(f"skipped: {sys.executable} has no {module} (Debian: python3-{module})")
            return SKIPPED
    import pytest

    class Counter:
        ran = 0

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.ran += report.when == "call" and not report.skipped

    counter = Counter()
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--durations=3", *sys.argv[1:]], plugins=[counter])
    return SKIPPED if status == 0 and counter.ran == 0 else int(status)


if __name__ == "__main__":
    sys.exit(main())
