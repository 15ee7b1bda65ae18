"""`stretto compare`: make the runs of a study, then its report.

While they are made, a process of low priority writes the page again as runs finish.
"""

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TextIO

from stretto.errors import StrettoError, UsageError
from stretto.options.extras import missing
from stretto.options.named import parse
from stretto.report import Record, build, panels
from stretto.report.metric import metrics_of
from stretto.report.page import StudyProgress
from stretto.settings.runs import CompareSettings, known
from stretto.study.report_page import PAGE, prepare_trackers, track_study, write_report
from stretto.study.run_processes import Failure, OnRun, OnSteps, run_all
from stretto.study.shared_queue import SharedQueue, open_storage, refuse_other_sources, storage_errors
from stretto.study.store import locked, writing
from stretto.study.study import Study, claimed, describe, prepared_trials, record_of
from stretto.study.training_run import Task
from stretto.system.children import Child, end

BEGIN = 5.0  # seconds after which a study that still runs gets a page
TELL_EVERY = 1.0  # seconds from one message about the progress to the next, at least
SHORTEST, SHARE = 5.0, 0.05  # seconds between two pages, at least; the share of a core that pages may take
RELOAD = 15.0  # seconds after which the page loads itself again, at least: its charts are drawn anew each time
LONGEST = 60.0  # seconds until the time left is written again, though no run has finished
NICE, NICE_TO_TIMED = 5, 19  # niceness of the process; where runs have processes of their own, they are timed
WRITER = ".report.lock"  # in the study's folder: locked by the one process that writes the page, of several commands
Progress = tuple[float, float | None]  # share of the steps that are made, seconds left


class LivePage:
    """Keeps report.html of a study up to date. Use as a context manager, around the making of its runs.

    What goes wrong with the page is passed to `tell`, once, and is nothing to the study. Of several commands on one
    folder (`shared`) one writes the page.
    """

    def __init__(
        self, study: Study, tell: Callable[[str], None], *, shared: bool = False, begin: float = BEGIN
    ) -> None:
        self._study, self._tell, self._shared, self._begin = study, tell, shared, begin
        self._total = sum(known(task.settings.steps) for task in study.tasks)
        self._done = self._before = self._total - sum(known(task.settings.steps) for task in study.pending)
        self._since = self._told = time.monotonic()
        self._child: Child | None = None
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._hear()
            end([self._child], at_once=True)

    def advance(self, steps: int) -> None:
        """Count so many more steps as made; start the process, or tell it, when it is time."""
        self._done += steps
        now = time.monotonic()
        if self._failed or now < (self._since + self._begin if self._child is None else self._told + TELL_EVERY):
            return
        self._told = now
        try:
            if self._child is None:
                self._child = Child(keep_page, self._study, self._shared)
            self._hear()
            if not self._failed:
                self._child.pipe.send(self._progress(now - self._since))
        except (StrettoError, OSError) as error:
            self._fail(f"its process has ended ({error or type(error).__name__})")

    def _progress(self, seconds: float) -> Progress:
        made = self._done - self._before
        left = seconds * (self._total - self._done) / made if made > 0 else None
        return min(1.0, self._done / self._total), left

    def _hear(self) -> None:
        """Pass on why the process could not write the page, if it could not."""
        assert self._child is not None
        try:
            if not self._failed and self._child.pipe.poll():
                self._fail(str(self._child.receive()))
        except (EOFError, OSError):
            self._fail("its process has ended")

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._tell(
            f"{self._study.out / PAGE} is not kept up to date while the study runs: {reason}. The study goes on, and "
            "the page is written at its end"
        )


def keep_page(pipe: Connection, study: Study, shared: bool) -> None:
    """What the process does: write the page again and again until it is ended; send what goes wrong, then end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that no file stays half written
    if hasattr(os, "nice"):
        os.nice(NICE if study.settings.workers is None else NICE_TO_TIMED)
    importlib.import_module("stretto.report.page_sections")  # slow
    with PageWriter(study, shared=shared) as writer:
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

    def __init__(self, study: Study, *, shared: bool = False) -> None:
        self._study, self._shared = study, shared
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
        assert self._study.page is not None
        with writing(self._study.out):
            build(replace(self._study.page, records=records, progress=progress), self._study.out / PAGE)
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


RUN_KEYS = (
    "id", "method", "seed", "options", "status", "diverged_at", "train_loss", "train_accuracy", "validation_loss",
    "validation_accuracy", "validation_bleu", "test_loss", "test_accuracy", "test_bleu", "total_flops", "serial_flops",
    "seconds", "seconds_per_step",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The records of a study, the runs that failed, the path of the report, and {method: why it was left out}.

    `not_tried` are the runs that were left, as the first ones had all failed alike.
    """

    records: tuple[Record, ...]
    failures: tuple[Failure, ...]
    report: Path
    left_out: Mapping[str, str] = field(default_factory=dict)
    not_tried: tuple[str, ...] = ()

    @property
    def complaints(self) -> list[str]:
        """Why runs could not be made, for the user; once, where the others were not tried for it."""
        if not self.not_tried:
            return [f"{failure.task.settings.id} could not be run: {failure.reason}" for failure in self.failures]
        return [
            f"the first {len(self.failures)} runs failed alike, and the other {len(self.not_tried)} were not tried: "
            f"{self.failures[0].reason}"
        ]

    def to_json(self) -> dict[str, Any]:
        """The object that `stretto compare --json` prints."""
        return {
            "runs": [run_json(record) for record in self.records],
            "frontier": [
                panel.to_json() for metric in metrics_of(self.records) for panel in panels(self.records, metric)
            ],
            "left_out": dict(self.left_out),
            "failed": [failure.task.settings.id for failure in self.failures],
            "not_tried": list(self.not_tried),
            "report": str(self.report),
        }


def run_json(record: Record) -> dict[str, Any]:
    """One of the `runs` that `stretto compare --json` prints."""
    values = record.to_json()
    return (
        {key: values[key] for key in RUN_KEYS}
        | {"learned_nothing": record.learned_nothing}
        | record.metric_scores
        | {"options": {**parse(record.method)[1], **record.options}}
        | {"observed": record.observations[-1].to_json() if record.observations else None}
        | {"measured": [measurement.to_json() for measurement in record.measurements]}
    )


def default_jobs(settings: CompareSettings) -> int:
    """How many runs to make at a time: one a core, or fewer if each has several threads.

    One alone if each run has several processes, so that it is timed.
    """
    if settings.workers is not None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // settings.threads)


def compare(
    study: Study,
    *,
    jobs: int | None = None,
    on_steps: OnSteps = lambda _: None,
    on_run: OnRun = lambda _: None,
    command: str = "",
    storage: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Make the runs that are not finished, then the report.

    With the URL of a `storage`, all processes that compare the same study with it share the runs. With `tell` there is
    a page from early on, which is kept up to date; if that fails, `tell` is called with the reason, once. There is no
    page where its packages are not installed.
    """
    number = default_jobs(study.settings) if jobs is None else jobs
    opened = None if storage is None else open_storage(storage)
    if storage is not None and opened is not None:
        with storage_errors(storage):
            refuse_other_sources(opened, study)
    with claimed(study, exclusive=opened is None):
        prepare_trackers(study)
        page = study.page or describe(study, prepared_trials(study))
        study, drawn = replace(study, page=replace(page, command=command)), not missing("report")
        with live_page(study, tell if drawn else None, on_steps, shared=opened is not None) as advance:
            if storage is None or opened is None:
                take = partial(next, iter(study.pending), None)
                failures = run_all(take, number, advance, on_run, gives_up=not study.records())
            else:
                with storage_errors(storage), SharedQueue(opened, study) as queue:
                    failures = share(queue, number, advance, on_run)
        report = study.out / PAGE
        if drawn:
            track_study(study, write_report(study, command))
        return Outcome(study.records(), tuple(failures), report, study.left_out, not_tried(study, failures))


def not_tried(study: Study, failures: Collection[Failure]) -> tuple[str, ...]:
    """The names of runs that have neither finished nor failed."""
    failed = {failure.task.settings.id for failure in failures}
    return tuple(task.settings.id for task in study.pending if task.settings.id not in failed)


@contextmanager
def live_page(
    study: Study, tell: Callable[[str], None] | None, on_steps: OnSteps, *, shared: bool
) -> Iterator[OnSteps]:
    """Keep the page up to date, if there is somebody to `tell`; yields what is to be called with the steps made."""
    if tell is None:
        yield on_steps
        return
    with LivePage(study, tell, shared=shared) as page:

        def advance(steps: int) -> None:
            on_steps(steps)
            page.advance(steps)

        yield advance


def share(queue: SharedQueue, jobs: int, on_steps: OnSteps, on_run: OnRun) -> list[Failure]:
    """Make runs of a shared study until all are finished, on this machine or others; return those that failed."""

    def on_own_run(task: Task) -> None:
        queue.finish(task)
        on_run(task)

    while True:
        for failure in run_all(queue.take, jobs, on_steps, on_own_run):
            queue.fail(failure)
        settled = queue.settled  # before fetch, so that no run that ends in between is missed
        for task in queue.fetch():
            on_steps(known(task.settings.steps))
            on_run(task)
        if settled:
            return list(queue.failures())
        time.sleep(queue.pause)
