"""The main job: make a study's runs, then its page."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stretto.methods import method
from stretto.report import METRICS, Record, panels
from stretto.settings.runs import known
from stretto.study.process_pool import Failure, OnRun, OnSteps, Task, run_all
from stretto.study.report_page import write_report
from stretto.study.shared_queue import Roster
from stretto.study.shared_storage import open_storage, reached
from stretto.study.study import Study, claimed


@dataclass(frozen=True)
class Outcome:
    """What a study came to."""

    records: tuple[Record, ...]
    failures: tuple[Failure, ...]
    report: Path
    left_out: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object that `stretto compare --json` prints."""
        keys = ("id", "method", "seed", "options", "status", "diverged_at", "train_loss", "train_accuracy",
                "validation_loss", "validation_accuracy", "validation_bleu", "test_loss", "test_accuracy",
                "test_bleu", "total_flops", "serial_flops", "seconds", "seconds_per_step")  # fmt: skip
        return {
            "runs": [
                {key: record.to_json()[key] for key in keys}
                | {"options": {**method(record.method).options, **record.options}}
                | {"observed": record.observations[-1].to_json() if record.observations else None}
                | {"measured": [measurement.to_json() for measurement in record.measurements]}
                for record in self.records
            ],
            "frontier": [panel.to_json() for metric in METRICS for panel in panels(self.records, metric)],
            "left_out": dict(self.left_out),
            "failed": [failure.task.settings.id for failure in self.failures],
            "report": str(self.report),
        }


def default_jobs(workers: int | None) -> int:
    """One process a core that this one may use; runs on several processes go one after the other, to be timed."""
    if workers is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compare(
    study: Study,
    *,
    jobs: int | None = None,
    on_steps: OnSteps = lambda _: None,
    on_run: OnRun = lambda _: None,
    command: str = "",
    storage: str | None = None,
) -> Outcome:
    """Make the runs that are missing, then the report. What was finished before is not repeated.

    With a `storage`, its URL, whoever else has the same study and storage makes some of them.
    """
    many = default_jobs(study.settings.workers) if jobs is None else jobs
    opened = None if storage is None else open_storage(storage)
    with claimed(study, alone=opened is None):
        if storage is None or opened is None:
            failures = run_all(partial(next, iter(study.pending), None), many, on_steps, on_run)
        else:
            with reached(storage), Roster(opened, study) as roster:
                failures = share(roster, many, on_steps, on_run)
        return Outcome(study.records(), tuple(failures), write_report(study, command), study.left_out)


def share(roster: Roster, jobs: int, on_steps: OnSteps, on_run: OnRun) -> list[Failure]:
    """Make runs of a study as long as there are some, and wait for those of others; lost ones are made here."""

    def on_own(task: Task) -> None:
        roster.finish(task)
        on_run(task)

    while True:
        for failure in run_all(roster.take, jobs, on_steps, on_own):
            roster.fail(failure)
        settled = roster.settled  # asked before: what others end in between, the next round fetches
        for task in roster.fetch():
            on_steps(known(task.settings.steps))
            on_run(task)
        if settled:
            return list(roster.failures())
        time.sleep(roster.pause)
