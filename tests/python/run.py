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
        skipped = 0  # modules: their tests are not collected, which is an error to pytest

        def pytest_collectreport(self, report: Any) -> None:
            self.skipped += report.skipped

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.ran += report.when == "call" and not report.skipped

    counter = Counter()
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--durations=3", *sys.argv[1:]], plugins=[counter])
    nothing = status == pytest.ExitCode.OK or (status == pytest.ExitCode.NO_TESTS_COLLECTED and counter.skipped > 0)
    return SKIPPED if nothing and counter.ran == 0 else int(status)


if __name__ == "__main__":
    sys.exit(main())
