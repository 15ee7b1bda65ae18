"""What a study will do, in one line: optimizer, rates, batch sizes, runs, and about how many minutes they take."""

import itertools
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

from stretto.errors import UsageError
from stretto.methods import BASELINE
from stretto.nn.devices import computing_with
from stretto.options.import_object import is_model_folder
from stretto.settings.runs import TrainSettings, known
from stretto.study.comparison import default_jobs
from stretto.study.evaluation import EVALUATION_BATCH, ONE_PROCESS, TRAIN_SAMPLE, evaluation_steps
from stretto.study.prepare import costs_of, prepare_trial
from stretto.study.study import Study

TIMED = 2  # steps that are timed, after one to warm up


def outlook(study: Study, jobs: int | None = None) -> str:
    """The line for a user who may have chosen none of it. Without `jobs`, runs are made as `compare` makes them."""
    jobs = default_jobs(study.settings) if jobs is None else jobs
    settings, pending = study.settings, [task.settings for task in study.pending]
    rates = "" if settings.lr is None else f", lr {', '.join(f'{rate:g}' for rate in settings.lr)}"
    length = f"{settings.steps} steps" if settings.examples is None else f"{settings.examples} examples"
    at_once = f", {min(jobs, len(pending))} at a time" if min(jobs, len(pending)) > 1 else ""
    parts = [
        f"{settings.optimizer}{rates}",
        f"batch {', '.join(map(str, known(settings.batch_size)))}",
        f"{length}, {settings.seeds} seed{'s' * (settings.seeds > 1)}",
        f"{len(pending)} run{'s' * (len(pending) != 1)}{at_once}{about(pending, jobs)}",
    ]
    return "; ".join(parts)


def about(runs: Sequence[TrainSettings], jobs: int) -> str:
    """About how long these runs take; "" where a step of theirs cannot be tried: they say why themselves."""
    if not runs or is_model_folder(runs[0].model):  # whose weights are filled in by runs alone
        return ""
    sizes = {run.batch_size: run for run in runs}
    try:
        seconds = sum(seconds_of(run) * sum(each.batch_size == size for each in runs) for size, run in sizes.items())
    except UsageError:
        return ""
    minutes = seconds / min(jobs, len(runs)) / 60
    return ", less than a minute" if minutes < 1 else f", about {math.ceil(minutes)} minutes"


def seconds_of(run: TrainSettings) -> float:
    """The seconds that a run takes by a few of its steps and one evaluated batch, on plain training in one process."""
    began = time.perf_counter()
    trial = prepare_trial(replace(run, method=BASELINE, **ONE_PROCESS))  # any other computes about as much a step
    costs_of(trial)
    trainer, data = trial.trainer, trial.dataset
    x, y = data.train.first(known(run.batch_size))
    with computing_with(run.threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the runs warn
        trainer.step(x, y)
        times = [time.perf_counter()]
        for _ in range(TIMED):
            trainer.step(x, y)
        times.append(time.perf_counter())
        trainer.evaluate(itertools.islice(data.validation.batches(EVALUATION_BATCH), 1))
        times.append(time.perf_counter())
    step, row = (times[1] - times[0]) / TIMED, (times[2] - times[1]) / min(EVALUATION_BATCH, len(data.validation))
    rows = min(TRAIN_SAMPLE, len(data.train)) + len(data.validation)
    evaluations = len(evaluation_steps(known(run.steps), known(run.evaluations)))
    return times[0] - began + known(run.steps) * step + evaluations * rows * row
