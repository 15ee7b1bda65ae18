"""One process of a run on several, started by stretto.study.run_processes."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.measure import Costs
from stretto.settings.runs import TrainSettings
from stretto.study.process_pool import REPORT_EVERY
from stretto.study.training_run import run


@dataclass(frozen=True)
class Job:
    """What each process is told. `progress` is a pipe into which the first one writes how far it is."""

    settings: TrainSettings
    folder: Path
    costs: Costs
    trace: bool
    resume: bool
    progress: Path
    timeout: float
    keeps: bool


def work(job: Job) -> None:
    """Do this process's part."""
    torch.set_num_threads(1)  # as in emulation, so that the numbers are the same
    with job.progress.open("w", encoding="ascii") as pipe:
        first, last = os.environ.get("RANK") == "0", 0.0

        def on_step(step: int, loss: float | None) -> None:
            nonlocal last
            if first and (time.monotonic() - last > REPORT_EVERY or step == job.settings.steps):
                last = time.monotonic()
                print(step, "" if loss is None else loss, file=pipe, flush=True)

        resume = job.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        run(
            job.settings,
            job.folder,
            on_step,
            trace=job.trace,
            costs=job.costs,
            resume=resume,
            timeout=job.timeout,
            keeps=job.keeps,
        )
