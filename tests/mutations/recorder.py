"""A plugin of pytest that writes down which tests began, ended and failed, as they do: also of a run that is killed."""

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where."""
    parser.addoption("--events", help="a file for a line for each test that begins, ends or fails")


def pytest_configure(config: pytest.Config) -> None:
    """Write in the process that the others report to."""
    if config.getoption("--events") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(config.getoption("--events"))))


class Recorder:
    """Lines of "began", "ended" or "failed" and a test's id; a file that cannot be collected fails as a whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        print("began", nodeid, file=self._file)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It ends."""
        print("ended", nodeid, file=self._file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """It, or what it needs, fails."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file cannot be read."""
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            print("failed", report.nodeid, file=self._file)
