"""One run: train, evaluate now and then, keep what came of it."""

import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from stretto.data import Split, forever
from stretto.measure import Costs
from stretto.nn.remote_stage import Elsewhere
from stretto.nn.seeding import derive
from stretto.report.record import Point, Record
from stretto.settings.runs import TrainSettings, known
from stretto.study.bleu import Scorer
from stretto.study.checkpoints import Checkpoints, Request
from stretto.study.measurements import Gauge
from stretto.study.observation_windows import Lookout
from stretto.study.prepare import Prepared, costs_of, prepare
from stretto.study.run_progress import Progress
from stretto.study.store import RunWriter, versions

EVALUATION_BATCH = 128
TRAIN_SAMPLE = 512  # training examples that train loss and accuracy are evaluated on

OnStep = Callable[[int, float | None], None]  # (steps done, latest known training loss)


def run(
    settings: TrainSettings,
    folder: Path,
    on_step: OnStep = lambda *_: None,
    *,
    trace: bool = False,
    costs: Costs | None = None,
    resume: bool = False,
    timeout: float = 600,
    keeps: bool = False,
) -> Record:
    """Train as the (resolved) settings say and leave run.json, events.jsonl and model.safetensors in `folder`.

    A loss that is no finite number ends the run as diverged. `trace` adds what each worker did, and when. `costs` are
    measured if they are not given, which takes all stages. On several processes it is a collective: every one of them
    trains, the first one writes. `resume` goes on from the newest checkpoint that is whole, if there is one.
    Nobody waits for another process longer than `timeout` seconds. Asked to stop, it saves a checkpoint first if it
    `keeps` one, or saves them anyway.
    """
    prepared = prepare(settings, timeout)
    trainer = prepared.trainer
    if costs is None:
        costs = costs_of(prepared)
    checkpoints = Checkpoints(settings, folder)
    recordings = trainer.record() if trace else []
    with trainer.together(), RunWriter(folder, trainer.rank, trainer.processes, resume=resume) as writer:
        progress, complaints = checkpoints.load(trainer) if resume else (Progress(), [])
        stages = [index for index, stage in enumerate(trainer.stages) if not isinstance(stage, Elsewhere)]
        where = dict(zip(("replica", "worker"), trainer.placement.at(trainer.rank), strict=True))
        writer.worker_event(
            "start", rank=trainer.rank, pid=os.getpid(), host=socket.gethostname(), **where, stages=stages
        )
        writer.event("start", id=settings.id, settings=settings.to_json())
        replay(progress, complaints, writer)
        with Request() if keeps or checkpoints.every else nullcontext() as request:
            train_until_done(prepared, costs, progress, checkpoints, request, writer, on_step)
        record = make_record(settings, costs, progress)
        order = trainer.order()
        if order is not None:  # of a parameter server's updates
            writer.event("order", stages=order.to_json())
        writer.event(record.status, step=progress.steps, **progress.final)
        writer.traces(recordings)
        weights = trainer.gather()  # every process has written what it writes when this one is through
        if weights is not None:
            writer.finish(content(prepared, costs, progress, record), weights)
            checkpoints.clear()
    return record


def replay(progress: Progress, complaints: list[str], writer: RunWriter) -> None:
    """Write again what a run that goes on had seen before."""
    if progress.steps or complaints:
        writer.event("resume", step=progress.steps, skipped=complaints)
        writer.worker_event("resume", step=progress.steps, skipped=complaints)
    for observation in progress.observations:
        writer.event("observation", **observation.to_json())
    for point in progress.points:
        writer.event("evaluation", **point.to_json())
    for measurement in progress.measurements:
        writer.event("measurement", **measurement.to_json())


def content(prepared: Prepared, costs: Costs, progress: Progress, record: Record) -> dict[str, Any]:
    """What run.json says."""
    settings = prepared.settings
    return {
        "settings": settings.to_json(),
        "versions": versions(),
        "model": prepared.model.description,
        "dataset": prepared.dataset.description,
        "mesh": prepared.trainer.placement.axes,
        "accounting": costs.accounting,
        "flops_per_example": {f"{stage}{kind}": value for (kind, stage), value in costs.flops.items()},
        "seconds_per_step": record.seconds_per_step,
        "record": {**record.to_json(), "points": [], "observations": [], "measurements": []},
    }


def train_until_done(
    prepared: Prepared,
    costs: Costs,
    progress: Progress,
    checkpoints: Checkpoints,
    request: Request | None,
    writer: RunWriter,
    on_step: OnStep,
) -> None:
    """Train, evaluate and write events until the steps are done or a loss is no number any more.

    Raises KeyboardInterrupt, having saved, once a process has been asked to stop.
    """
    settings, trainer = prepared.settings, prepared.trainer
    steps = known(settings.steps)
    wanted = evaluation_steps(steps, known(settings.evaluations))
    lookout = Lookout(trainer, steps) if trainer.processes == 1 else None  # it looks at all stages
    gauge, scorer = Gauge(prepared, wanted), Scorer(prepared)
    done, seed = progress.steps, derive(settings.seed, "batches")
    batches = forever(prepared.dataset.train, known(settings.batch_size), seed, start=done)
    for step, (x, y) in zip(range(done + 1, steps + 1), batches, strict=False):
        before = time.perf_counter()
        if lookout is not None:
            lookout.before(step)
        loss = trainer.step(x, y)
        if step == steps or checkpoints.due(step):
            trainer.flush()
        progress.step_seconds.append(time.perf_counter() - before)
        on_step(step, loss)
        if loss is not None and not math.isfinite(loss):
            progress.diverged_at = step
            return
        observation = None if lookout is None else lookout.after(step)
        if observation is not None:
            progress.observations.append(observation)
            writer.event("observation", **observation.to_json())
        if step in wanted:
            point = evaluate(prepared, costs, step, sum(progress.step_seconds), scorer)
            if point is None:
                progress.diverged_at = step
                return
            progress.points.append(point)
            writer.event("evaluation", **point.to_json())
            writer.worker_event("evaluation", step=step, seconds=point.seconds)
            measurement = gauge.measure(step)
            if measurement is not None:
                progress.measurements.append(measurement)
                writer.event("measurement", **measurement.to_json())
        stops = request is not None and trainer.stops(request.made) and step < steps
        if stops or (checkpoints.due(step) and step < steps):
            path = checkpoints.save(trainer, progress)
            writer.worker_event("checkpoint", step=step, path=str(path))
        if stops:
            raise KeyboardInterrupt(f"stopped after step {step}, which is saved")
    test = trainer.evaluate(prepared.dataset.test.batches(EVALUATION_BATCH))
    last = progress.points[-1]
    progress.final = {
        "train_loss": last.train_loss,
        "train_accuracy": last.train_accuracy,
        "validation_loss": last.validation_loss,
        "validation_accuracy": last.validation_accuracy,
        "validation_bleu": last.validation_bleu,
        "test_loss": finite(test["loss"]),
        "test_accuracy": test.get("accuracy"),
        "test_bleu": scorer.test(),
    }


def evaluate(prepared: Prepared, costs: Costs, step: int, seconds: float, scorer: Scorer) -> Point | None:
    """One point on the run's curves, with what it has cost so far; None if a loss is no finite number."""
    dataset, trainer = prepared.dataset, prepared.trainer
    sample = Split(dataset.train.x[:TRAIN_SAMPLE], dataset.train.y[:TRAIN_SAMPLE])
    train = trainer.evaluate(sample.batches(EVALUATION_BATCH))
    validation = trainer.evaluate(dataset.validation.batches(EVALUATION_BATCH))
    if not (math.isfinite(train["loss"]) and math.isfinite(validation["loss"])):
        return None
    examples = step * known(prepared.settings.batch_size)
    return Point(
        step=step,
        examples=examples,
        total_flops=examples * costs.total,
        serial_flops=costs.serial_after(step),
        seconds=seconds,
        train_loss=train["loss"],
        validation_loss=validation["loss"],
        validation_accuracy=validation.get("accuracy"),
        validation_bleu=scorer.validation(),
        train_accuracy=train.get("accuracy"),
    )


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """When to evaluate: about `evaluations` times, closer together at the start, always after the last step.

    Costs are compared on logarithmic axes, so early steps need to be told apart as well as late ones.
    """
    return {max(1, math.ceil(steps * (i / evaluations) ** 2)) for i in range(1, evaluations + 1)}


def make_record(settings: TrainSettings, costs: Costs, progress: Progress) -> Record:
    """The run as the report and `--json` show it."""
    steps = progress.steps
    steady = progress.step_seconds[known(settings.stages) :]  # once the pipeline is full
    options: dict[str, Any] = {"lr": settings.lr, "batch_size": settings.batch_size}
    return Record(
        id=settings.id,
        method=settings.method,
        seed=settings.seed,
        options=options,
        status="finished" if progress.diverged_at is None else "diverged",
        diverged_at=progress.diverged_at,
        points=tuple(progress.points),
        observations=tuple(progress.observations),
        measurements=tuple(progress.measurements),
        total_flops=steps * known(settings.batch_size) * costs.total,
        serial_flops=costs.serial_after(steps),
        seconds=sum(progress.step_seconds),
        seconds_per_step=statistics.median(steady or progress.step_seconds),
        **progress.final,
    )


def finite(value: float) -> float | None:
    """A number that JSON can hold, or None."""
    return value if math.isfinite(value) else None
