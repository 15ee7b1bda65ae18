"""Making a study's runs: any number of processes, each of which takes the next run that nobody is at."""

import statistics
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from harness.cells import Record, Run, Study
from harness.halving import next_runs, runs_left, value
from harness.machine import QUIET, load, machine, versions
from harness.store import Store

PAUSE = 2.0  # seconds until another look at what others have finished


def make_run(study: Study, run: Run, data: str | None, jobs: int = 1) -> dict[str, Any]:
    """Train one run in this process, with one thread; returns its record."""
    torch.set_num_threads(1)
    cell, began = run.cell, load()
    measured = study.train(cell, run.rate, run.seed, run.steps, data)
    loads = [began, load()]
    return {
        "key": run.key, "study": study.name, "cell": cell.name, "method": cell.method, "optimizer": cell.optimizer,
        "settings": dict(cell.settings), "rate": run.rate, "seed": run.seed, "steps": run.steps, **measured,
        "load": loads, "noisy": max(loads) > jobs + QUIET, "versions": versions(), "machine": machine(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def work(study: Study, store: Store, data: str | None, jobs: int, only: str = "") -> None:
    """Make runs until there are none left to make; waits for those of other processes that the rest depends on."""
    versions()  # of the code that this process has loaded, whatever the repository is at later
    while True:
        todo = [run for run in next_runs(study, store.read()) if only in run.cell.name]
        if not todo:
            return
        if not any(_tried(study, store, run, data, jobs) for run in todo):
            time.sleep(PAUSE)


def _tried(study: Study, store: Store, run: Run, data: str | None, jobs: int) -> bool:
    """Make this run unless another process is at it, or has made it; whether it was made."""
    with store.claimed(run) as mine:
        if not mine:
            return False
        start = time.monotonic()
        record = make_run(study, run, data, jobs)
        store.add(record)
        print(progress(study, store.read(), record, time.monotonic() - start, jobs), file=sys.stderr, flush=True)
        return True


def progress(study: Study, finished: Mapping[str, Record], record: Record, seconds: float, jobs: int) -> str:
    """A line: how many runs are finished, what the last one came to, and the time that is left by the steps so far."""
    per_step = statistics.median(each["seconds a step"]["wall"] for each in finished.values())
    left = runs_left(study, finished)
    minutes = sum(run.steps for run in left) * per_step / jobs / 60
    end = f"diverged at step {record['diverged']}" if record["diverged"] else f"validation {value(record):.4g}"
    return (
        f"[{len(finished)}/{len(finished) + len(left)}] {record['key']}: {end}, {seconds:.0f} s; "
        f"about {minutes / 60:.1f} h left"
    )
