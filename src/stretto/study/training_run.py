"""One run: train, evaluate at some steps, write events and results."""

import itertools
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from stretto.data import Dataset, forever
from stretto.data.user_data import UserData
from stretto.measure import Costs
from stretto.measure.energy import EnergyMeter, energy_meter
from stretto.models.hugging_face import write_surroundings
from stretto.nn.devices import name_of, pick_device_of
from stretto.nn.remote_stage import RemoteStage
from stretto.nn.seeding import derive
from stretto.options.user_function import is_model_folder
from stretto.processes.stop_request import StopRequest
from stretto.report.record import Measurement, Observation, Point, Record
from stretto.runtime.process_memory import forget_most_held
from stretto.runtime.world import is_one_machine
from stretto.settings.runs import TrainSettings, known, parse_metric
from stretto.splitting import Stages
from stretto.study.checkpoints import Checkpoints
from stretto.study.disk_errors import writing
from stretto.study.measurements import Bleu, Measurer, ObservationWindows
from stretto.study.prepare import Prepared, costs_of, metrics_of, prepare
from stretto.study.store import STUDY, RunWriter, versions
from stretto.tracing import Recording
from stretto.trackers import RunDescription
from stretto.trackers import find as find_trackers
from stretto.trainer.metrics import Metric, refuse_undefined
from stretto.trainer.tracking import Tracking, bubble_of, drawing_of

EVALUATION_BATCH = 128
TRAIN_SAMPLE = 512  # training examples that train loss and accuracy are evaluated on

OnStep = Callable[[int, float | None], None]  # (steps done, latest known training loss)


def counting(advance: Callable[[int], object]) -> OnStep:
    """Call `advance` with the number of new steps, where the number of all is told."""
    done = 0

    def on_step(step: int, _: float | None) -> None:
        nonlocal done
        advance(step - done)
        done = step

    return on_step


@dataclass
class Progress:
    """The state of a run while it trains: with a trainer's checkpoint it is enough to go on.

    `step_seconds` has one entry for each step that was made; `final` the losses and accuracies of a finished run.
    `joules_before` is the energy up to the checkpoint that a run goes on from, None if it is not known; `tracker_ids`
    are what trackers call the run.
    """

    points: list[Point] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    diverged_at: int | None = None
    final: dict[str, Any] = field(default_factory=dict)
    joules_before: float | None = 0.0
    meter: EnergyMeter | None = None
    tracker_ids: dict[str, str] = field(default_factory=dict)

    @property
    def joules(self) -> float | None:
        """The energy of all steps, evaluations apart; None if it is not measured."""
        measured = None if self.meter is None else self.meter.joules
        return None if measured is None or self.joules_before is None else self.joules_before + measured

    @property
    def steps(self) -> int:
        """The number of steps that were made."""
        return len(self.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain data; a run that has ended keeps none."""
        return {
            "points": [point.to_json() for point in self.points],
            "observations": [observation.to_json() for observation in self.observations],
            "measurements": [measurement.to_json() for measurement in self.measurements],
            "step_seconds": list(self.step_seconds),
            "joules": self.joules,
            "trackers": self.tracker_ids,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(
            [Point.from_json(point) for point in data["points"]],
            [Observation.from_json(observation) for observation in data["observations"]],
            [Measurement.from_json(measurement) for measurement in data.get("measurements", ())],
            list(data["step_seconds"]),
            joules_before=data.get("joules"),
            tracker_ids=dict(data.get("trackers", {})),
        )


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
    alone: bool = True,
) -> Record:
    """Train as the (resolved) settings say and write run.json, events.jsonl and model.safetensors into `folder`.

    A loss that is not finite ends the run as diverged. `trace` also records what each worker did, and when. `costs` are
    measured if they are not given, for which this process needs all stages. On several processes it is a collective:
    all train, the first one writes. `resume` goes on from the newest checkpoint that is whole, if there is one. No
    process waits for another one longer than `timeout` seconds. A run that is asked to stop before its last step raises
    KeyboardInterrupt; it saves a checkpoint first if `keeps` is true or its settings save checkpoints anyway. Energy is
    measured, where it can be, if the run is `alone` on its machine.
    """
    forget_most_held()
    return run_prepared(
        prepare(settings, timeout), folder, on_step, trace=trace, costs=costs, resume=resume, keeps=keeps, alone=alone
    )


def run_prepared(
    prepared: Prepared,
    folder: Path,
    on_step: OnStep = lambda *_: None,
    *,
    trace: bool = False,
    costs: Costs | None = None,
    resume: bool = False,
    keeps: bool = False,
    alone: bool = True,
) -> Record:
    """As `run`, with a trainer that is there already and has not trained yet."""
    settings, trainer = prepared.settings, prepared.trainer
    if costs is None:
        costs = costs_of(prepared)
    checkpoints = Checkpoints(settings, folder)
    recordings = trainer.record() if trace else []
    with trainer.together(), RunWriter(folder, trainer.rank, trainer.processes, resume=resume) as writer:
        saved, complaints = checkpoints.load(trainer) if resume else (None, [])
        progress = Progress() if saved is None else Progress.from_json(saved)
        progress.meter = meter_of(prepared) if alone else None
        stages = [index for index, stage in enumerate(trainer.stages) if not isinstance(stage, RemoteStage)]
        where = dict(zip(("replica", "worker"), trainer.placement.at(trainer.rank), strict=True))
        writer.worker_event(
            "start",
            rank=trainer.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            **where,
            stages=stages,
            device=name_of(trainer.device),
        )
        writer.event("start", id=settings.id, settings=settings.to_json())
        replay(progress, complaints, writer)
        with (
            StopRequest() if keeps or checkpoints.every else nullcontext() as request,
            tracking_of(prepared, folder, progress) as tracking,
        ):
            train_until_done(prepared, costs, progress, checkpoints, request, writer, on_step, tracking)
            tracking.evaluation(progress.steps, test_scores(progress))
            progress.tracker_ids = tracking.for_checkpoint()
            record = make_record(prepared, costs, progress)
            write_results(prepared, costs, progress, record, recordings, writer)
            if trainer.rank == 0:
                checkpoints.clear()
    return record


@contextmanager
def tracking_of(prepared: Prepared, folder: Path, progress: Progress) -> Iterator[Tracking]:
    """The run in the trackers of its settings: a new one, or that of the checkpoint which it goes on from."""
    settings, trainer, study = prepared.settings, prepared.trainer, folder.absolute().parent.parent
    description = RunDescription(
        name=folder.name,
        settings=settings.to_show() | {"bubble": bubble_of(trainer) if settings.log else None},
        schedule=drawing_of(trainer) if settings.log else "",
        group=study.name if (study / STUDY).is_file() else None,
        ids=progress.tracker_ids,
        since=progress.steps,
    )
    tracking = trainer.track(
        find_trackers(settings.log), description, lambda text: print(f"stretto: {text}", file=sys.stderr, flush=True)
    )
    finished = False
    try:
        yield tracking
        finished = progress.diverged_at is None
    finally:
        tracking.close(finished=finished)


def write_results(
    prepared: Prepared, costs: Costs, progress: Progress, record: Record, recordings: list[Recording], writer: RunWriter
) -> None:
    """Write the last event, traces and weights of a run that has ended, and give it its folder; a collective."""
    trainer = prepared.trainer
    order = trainer.order()
    if order is not None:  # in which a parameter server updated
        writer.event("order", stages=order.to_json())
    writer.event(record.status, step=progress.steps, **progress.final)
    writer.traces(recordings)
    weights = write_or_gather(prepared, writer)  # a collective: afterwards every process has written its files
    memory = trainer.peak_memory()
    if weights is not None and memory is not None:
        writer.finish(run_json(prepared, costs, progress, record, memory), *weights)


def meter_of(prepared: Prepared) -> EnergyMeter | None:
    """On the first process a meter of this machine's energy, if all processes are on it; None elsewhere."""
    trainer = prepared.trainer
    if trainer.rank > 0 or (trainer.processes > 1 and not is_one_machine(os.environ)):
        return None
    if trainer.processes == 1:
        return energy_meter([trainer.device])
    return energy_meter({pick_device_of(prepared.settings.device, rank) for rank in range(trainer.processes)})


def write_or_gather(prepared: Prepared, writer: RunWriter) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """On rank 0 the trained weights, and those of heads, for files of their own; None elsewhere.

    Of a Hugging Face model each process writes its own stages, as a folder that from_pretrained reads.
    """
    if not is_model_folder(prepared.settings.model):
        weights = prepared.trainer.gather()
        return None if weights is None else (prepared.named(weights), heads_in(prepared, weights))
    stages, module = prepared.stages, prepared.model.module
    assert isinstance(stages, Stages)
    assert module is not None
    with writing(writer.folder):
        heads = prepared.trainer.write_weights(writer.model_folder, stages.name_in_model)
        if heads is None:
            return None
        write_surroundings(prepared.settings.model, module, writer.model_folder)
    return {}, heads


def heads_in(prepared: Prepared, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of heads, which a user's own module has no place for; those of other networks are in one file."""
    return {} if not prepared.is_users else {k: v for k, v in weights.items() if k.startswith("heads.")}


def replay(progress: Progress, complaints: list[str], writer: RunWriter) -> None:
    """Write the events of a resumed run's earlier steps again."""
    if progress.steps or complaints:
        writer.event("resume", step=progress.steps, skipped=complaints)
        writer.worker_event("resume", step=progress.steps, skipped=complaints)
    for observation in progress.observations:
        writer.event("observation", **observation.to_json())
    for point in progress.points:
        writer.event("evaluation", **point.to_json())
    for measurement in progress.measurements:
        writer.event("measurement", **measurement.to_json())


def run_json(
    prepared: Prepared, costs: Costs, progress: Progress, record: Record, peak_memory: Sequence[int]
) -> dict[str, Any]:
    """The content of run.json; `peak_memory` is in bytes, of each process."""
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
        "peak_memory": [None if most < 0 else most for most in peak_memory],
        **({"trackers": progress.tracker_ids} if progress.tracker_ids else {}),
        "record": {**record.to_json(), "points": [], "observations": [], "measurements": []},
    }


def train_until_done(
    prepared: Prepared,
    costs: Costs,
    progress: Progress,
    checkpoints: Checkpoints,
    request: StopRequest | None,
    writer: RunWriter,
    on_step: OnStep,
    tracking: Tracking,
) -> None:
    """Train, evaluate and write events until all steps are made or a loss is not finite.

    Raises KeyboardInterrupt, having saved, once a process has been asked to stop.
    """
    settings, trainer = prepared.settings, prepared.trainer
    steps = known(settings.steps)
    evaluated = evaluation_steps(steps, known(settings.evaluations))
    observed = trainer.processes == 1 and not is_model_folder(settings.model)  # it takes all stages, and copies of them
    windows = ObservationWindows(trainer, steps) if observed else None
    measurer, bleu, metrics = Measurer(prepared, evaluated), Bleu(prepared), metrics_of(settings)
    done, seed = progress.steps, derive(settings.seed, "batches")
    batches = forever(prepared.dataset.train, known(settings.batch_size), seed, start=done)
    meter = progress.meter or EnergyMeter(())
    meter.start()
    for step, (x, y) in zip(range(done + 1, steps + 1), batches, strict=False):
        before = time.perf_counter()
        if windows is not None:
            windows.before(step)
        loss = trainer.step(x, y)
        flushed = trainer.flush() if step == steps or checkpoints.due(step) else []
        progress.step_seconds.append(time.perf_counter() - before)
        meter.tick()
        tracking.step(step, known(settings.batch_size) / progress.step_seconds[-1])
        if loss is not None:
            tracking.loss(step - trainer.lag, loss)
        tracking.last_losses(step, flushed)
        on_step(step, loss)
        if loss is not None and not math.isfinite(loss):
            progress.diverged_at = step
            return
        observation = None if windows is None else windows.after(step)
        if observation is not None:
            progress.observations.append(observation)
            writer.event("observation", **observation.to_json())
        if step in evaluated:
            with meter.paused():
                point = evaluate(prepared, costs, step, sum(progress.step_seconds), bleu, metrics)
                if point is None:
                    progress.diverged_at = step
                    return
                point = replace(point, joules=progress.joules)
                progress.points.append(point)
                writer.event("evaluation", **point.to_json())
                writer.worker_event("evaluation", step=step, seconds=point.seconds)
                tracking.evaluation(step, scores_of(point))
                measurement = measurer.measure(step)
            if measurement is not None:
                progress.measurements.append(measurement)
                writer.event("measurement", **measurement.to_json())
        stops = request is not None and trainer.stops(request.received) and step < steps
        if stops or (checkpoints.due(step) and step < steps):
            with meter.paused():
                progress.tracker_ids = tracking.for_checkpoint()
                path = checkpoints.save(trainer, progress.steps, progress.to_json())
            writer.worker_event("checkpoint", step=step, path=str(path))
        if stops:
            raise KeyboardInterrupt(f"stopped after step {step}, which is saved")
    progress.final = final_scores(prepared, progress.points[-1], bleu, metrics)


def scores_of(point: Point) -> dict[str, float | None]:
    """The numbers of an evaluation by name, the user's metrics among them."""
    values = point.to_json()
    del values["step"], values["metrics"]
    return values | {f"validation_{name}": value for name, value in point.metrics.items()}


def test_scores(progress: Progress) -> dict[str, float | None]:
    """What a finished run came to on the test split; nothing of one that diverged."""
    values = {key: value for key, value in progress.final.items() if key.startswith("test_")}
    return values | {f"test_{name}": value for name, value in values.pop("test_metrics", {}).items()}


def final_scores(prepared: Prepared, last: Point, bleu: Bleu, metrics: Sequence[Metric]) -> dict[str, Any]:
    """The losses, accuracies and metrics of a finished run: those of its last evaluation, and on the test split."""
    split = prepared.dataset.test
    test: dict[str, float] = {}
    if split is not None:
        test = prepared.trainer.evaluate(split.batches(EVALUATION_BATCH), by_name(metrics))
    test_metrics = {metric.name: test[metric.name] for metric in metrics if test}
    refuse_undefined(test_metrics, "on the test split")
    test_loss = test.get("loss")
    return {
        "train_loss": last.train_loss,
        "train_accuracy": last.train_accuracy,
        "validation_loss": last.validation_loss,
        "validation_accuracy": last.validation_accuracy,
        "validation_bleu": last.validation_bleu,
        "test_loss": test_loss if test_loss is not None and math.isfinite(test_loss) else None,
        "test_accuracy": test.get("accuracy"),
        "test_bleu": bleu.test(),
        "metrics": dict(last.metrics),
        "test_metrics": test_metrics,
    }


def evaluate(
    prepared: Prepared, costs: Costs, step: int, seconds: float, bleu: Bleu, metrics: Sequence[Metric]
) -> Point | None:
    """Evaluate after a step, and price the run so far; None if a loss is not finite.

    Raises UsageError for a metric that is not finite where the loss is.
    """
    dataset, trainer = prepared.dataset, prepared.trainer
    train = trainer.evaluate(train_sample(dataset))
    validation = trainer.evaluate(dataset.validation.batches(EVALUATION_BATCH), by_name(metrics))
    if not (math.isfinite(train["loss"]) and math.isfinite(validation["loss"])):
        return None
    measured = {metric.name: validation[metric.name] for metric in metrics}
    refuse_undefined(measured, f"on the validation split after step {step}")
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
        validation_bleu=bleu.validation(),
        train_accuracy=train.get("accuracy"),
        metrics=measured,
    )


def train_sample(dataset: Dataset | UserData) -> Iterator[tuple[Any, Any]]:
    """The training examples that train loss and accuracy are evaluated on, the same in every run.

    Of the user's data they are evenly spread, as examples may be sorted by class; all others are shuffled: the first.
    """
    if not isinstance(dataset, UserData) or len(dataset.train) <= TRAIN_SAMPLE:
        return itertools.islice(dataset.train.batches(EVALUATION_BATCH), TRAIN_SAMPLE // EVALUATION_BATCH)
    rows = torch.arange(TRAIN_SAMPLE) * len(dataset.train) // TRAIN_SAMPLE
    return dataset.train.read_all((part, None) for part in torch.split(rows, EVALUATION_BATCH))


def by_name(metrics: Sequence[Metric]) -> dict[str, Any]:
    """The metrics' functions by name, as `Trainer.evaluate` takes them."""
    return {metric.name: metric.function for metric in metrics}


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """The steps after which to evaluate: about `evaluations`, closer together at the start, the last step among them.

    Costs are compared on logarithmic axes, so early steps have to be as far apart on them as late ones.
    """
    return {max(1, math.ceil(steps * (i / evaluations) ** 2)) for i in range(1, evaluations + 1)}


def make_record(prepared: Prepared, costs: Costs, progress: Progress) -> Record:
    """The record of the run, as the report and `--json` show it."""
    settings, steps = prepared.settings, progress.steps
    steady = progress.step_seconds[known(settings.stages) :]  # with a full pipeline
    rate = {} if settings.lr is None else {"lr": settings.lr}
    options: dict[str, Any] = {**rate, "batch_size": settings.batch_size}
    named = map(parse_metric, settings.metric)
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
        device=name_of(prepared.trainer.device),
        threads=torch.get_num_threads(),
        higher_is_better=tuple(name for name, _, higher in named if higher),
        energy_source="" if progress.meter is None or progress.joules is None else progress.meter.source,
        **progress.final,
    )
