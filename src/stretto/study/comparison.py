"""`stretto compare`: make the runs of a study, then its report."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stretto.options.named import parse
from stretto.report import Page, Record, panels
from stretto.report.metric import metrics_of
from stretto.settings.runs import known
from stretto.study.live_page import LivePage
from stretto.study.process_pool import Failure, OnRun, OnSteps, run_all
from stretto.study.report_page import describe, write_report
from stretto.study.shared_queue import SharedQueue, open_storage, refuse_other_sources, storage_errors
from stretto.study.study import Study, Task, claimed
from stretto.study.tracked_report import prepare_trackers, track_study

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


def default_jobs(workers: int | None, threads: int = 1) -> int:
    """How many runs to make at a time: one a core, or fewer if each has several threads.

    One alone if each run has several processes, so that it is timed.
    """
    if workers is not None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


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
    a page from early on, which is kept up to date; if that fails, `tell` is called with the reason, once.
    """
    number = default_jobs(study.settings.workers, study.settings.threads) if jobs is None else jobs
    opened = None if storage is None else open_storage(storage)
    if storage is not None and opened is not None:
        with storage_errors(storage):
            refuse_other_sources(opened, study)
    with claimed(study, exclusive=opened is None):
        prepare_trackers(study)
        described = describe(study, command)
        with live_page(study, described, tell, on_steps, shared=opened is not None) as advance:
            if storage is None or opened is None:
                take = partial(next, iter(study.pending), None)
                failures = run_all(take, number, advance, on_run, gives_up=not study.records())
            else:
                with storage_errors(storage), SharedQueue(opened, study) as queue:
                    failures = share(queue, number, advance, on_run)
        report = write_report(study, command, described=described)
        track_study(study, report)
        return Outcome(study.records(), tuple(failures), report, study.left_out, not_tried(study, failures))


def not_tried(study: Study, failures: Collection[Failure]) -> tuple[str, ...]:
    """The names of runs that have neither finished nor failed."""
    failed = {failure.task.settings.id for failure in failures}
    return tuple(task.settings.id for task in study.pending if task.settings.id not in failed)


@contextmanager
def live_page(
    study: Study, described: Page, tell: Callable[[str], None] | None, on_steps: OnSteps, *, shared: bool
) -> Iterator[OnSteps]:
    """Keep the page up to date, if there is somebody to `tell`; yields what is to be called with the steps made."""
    if tell is None:
        yield on_steps
        return
    with LivePage(study, described, tell, shared=shared) as page:

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
