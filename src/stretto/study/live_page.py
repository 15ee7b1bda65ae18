"""The page of a study while its runs are made: a process of low priority writes it again as runs finish."""

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Self, TextIO

from stretto.errors import StrettoError, UsageError
from stretto.processes import fork_server
from stretto.report import Page, Record, build
from stretto.report.page import StudyProgress
from stretto.settings.runs import known
from stretto.study.disk_errors import locked, writing
from stretto.study.report_page import PAGE
from stretto.study.study import Study, record_of

BEGIN = 5.0  # seconds after which a study that still runs gets a page
TELL_EVERY = 1.0  # seconds from one message about the progress to the next, at least
SHORTEST, SHARE = 5.0, 0.05  # seconds between two pages, at least; the share of a core that pages may take
RELOAD = 15.0  # seconds after which the page loads itself again, at least: its charts are drawn anew each time
LONGEST = 60.0  # seconds until the time left is written again, though no run has finished
NICE, NICE_TO_TIMED = 5, 19  # niceness of the process; where runs have processes of their own, they are timed
ENDING = 5.0  # seconds that the process has to end
WRITER = ".report.lock"  # in the study's folder: locked by the one process that writes the page, of several commands
Progress = tuple[float, float | None]  # share of the steps that are made, seconds left


class LivePage:
    """Keeps report.html of a study up to date. Use as a context manager, around the making of its runs.

    `described` is the page without runs. What goes wrong with the page is passed to `tell`, once, and is nothing to the
    study. Of several commands on one folder (`shared`) one writes the page.
    """

    def __init__(
        self, study: Study, described: Page, tell: Callable[[str], None], *, shared: bool = False, begin: float = BEGIN
    ) -> None:
        self._study, self._described, self._tell, self._shared, self._begin = study, described, tell, shared, begin
        self._total = sum(known(task.settings.steps) for task in study.tasks)
        self._done = self._before = self._total - sum(known(task.settings.steps) for task in study.pending)
        self._since = self._told = time.monotonic()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            self._hear()
            self._pipe.close()
        if self._process is not None:
            self._process.terminate()
            self._process.join(ENDING)
            self._process.kill()
            self._process.join()

    def advance(self, steps: int) -> None:
        """Count so many more steps as made; start the process, or tell it, when it is time."""
        self._done += steps
        now = time.monotonic()
        if self._failed or now < (self._since + self._begin if self._process is None else self._told + TELL_EVERY):
            return
        self._told = now
        try:
            if self._process is None:
                self._process, self._pipe = fork_server.start(keep_page, self._study, self._described, self._shared)
            self._hear()
            if self._pipe is not None and not self._failed:
                self._pipe.send(self._progress(now - self._since))
        except (StrettoError, OSError) as error:
            self._fail(f"its process has ended ({error or type(error).__name__})")

    def _progress(self, seconds: float) -> Progress:
        made = self._done - self._before
        left = seconds * (self._total - self._done) / made if made > 0 else None
        return min(1.0, self._done / self._total), left

    def _hear(self) -> None:
        """Pass on why the process could not write the page, if it could not."""
        assert self._pipe is not None
        try:
            if not self._failed and self._pipe.poll():
                self._fail(str(self._pipe.recv()))
        except (EOFError, OSError):
            self._fail("its process has ended")

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._tell(
            f"{self._study.out / PAGE} is not kept up to date while the study runs: {reason}. The study goes on, and "
            "the page is written at its end"
        )


def keep_page(pipe: Connection, study: Study, described: Page, shared: bool) -> None:
    """What the process does: write the page again and again until it is ended; send what goes wrong, then end."""
    fork_server.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that no file stays half written
    if hasattr(os, "nice"):
        os.nice(NICE if study.settings.workers is None else NICE_TO_TIMED)
    with contextlib.suppress(ImportError):  # without the extra "report" the first page says so
        importlib.import_module("stretto.report.page_sections")
    ended = contextlib.suppress(EOFError, BrokenPipeError)  # of the parent
    with ended, PageWriter(study, described, shared=shared) as writer:
        while True:
            progress = pipe.recv()
            while pipe.poll():
                progress = pipe.recv()
            try:
                writer.write_if_due(*progress)
            except (OSError, StrettoError) as error:
                pipe.send(str(error))
                return


class PageWriter:
    """Writes the page of a study that is being made, not too often. Use as a context manager."""

    def __init__(self, study: Study, described: Page, *, shared: bool = False) -> None:
        self._study, self._described, self._shared = study, described, shared
        self._records: dict[str, Record] = {}
        self._lock: TextIO | None = None
        self._number, self._written, self._pause = -1, -LONGEST, SHORTEST

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def write_if_due(self, share: float, seconds_left: float | None) -> bool:
        """Write the page if a run has finished and the last page is old enough; whether it was written.

        The page of a study whose runs are all there is left to the command that makes them. Raises OSError.
        """
        now, cpu_seconds = time.monotonic(), time.process_time()
        if now < self._written + self._pause:
            return False
        records = self._finished()
        if len(records) == len(self._study.tasks) or not self._is_writer():
            return False
        if len(records) == self._number and now < self._written + LONGEST:
            return False
        progress = StudyProgress(share=share, seconds_left=seconds_left, reload=max(RELOAD, self._pause))
        with writing(self._study.out):
            build(replace(self._described, records=records, progress=progress), self._study.out / PAGE)
        self._number, self._written = len(records), time.monotonic()
        self._pause = max(SHORTEST, (time.process_time() - cpu_seconds) / SHARE)
        return True

    def _finished(self) -> tuple[Record, ...]:
        """The records of the finished runs, in the order of the settings; each is read once."""
        for task in self._study.tasks:
            if task.settings.id not in self._records and (record := record_of(task)) is not None:
                self._records[task.settings.id] = record
        return tuple(self._records[id] for task in self._study.tasks if (id := task.settings.id) in self._records)

    def _is_writer(self) -> bool:
        """Whether no process of another command writes the page."""
        if self._shared and self._lock is None:
            with contextlib.suppress(UsageError):
                self._lock = locked(self._study.out / WRITER, self._study.out)
        return not self._shared or self._lock is not None
