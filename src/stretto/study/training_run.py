"""One run: from its trainer through its steps, with evaluations, measurements and checkpoints, to its folder."""

import itertools
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.measure import Costs
from stretto.measure.energy import EnergyMeter, energy_meter
from stretto.models.hugging_face import write_surroundings
from stretto.nn.deferred import RemoteStage
from stretto.nn.devices import name_of, pick_device_of
from stretto.nn.input_errors import naming_rows
from stretto.options.import_object import is_model_folder
from stretto.report.record import Record, Stored
from stretto.runtime.process_memory import forget_most_held
from stretto.runtime.world import is_one_machine
from stretto.settings.command_line import parse_metric
from stretto.settings.runs import TrainSettings, known
from stretto.splitting import Stages
from stretto.study.checkpoints import Checkpoints, Progress
from stretto.study.evaluation import (
    Bleu,
    Measurer,
    ObservationWindows,
    evaluate,
    evaluation_steps,
    final_scores,
    scores_of,
    test_scores,
)
from stretto.study.operation_profile import OperationProfile, profiled_steps
from stretto.study.prepare import Prepared, costs_of, metrics_of, prepare
from stretto.study.store import STUDY, RunWriter, versions, writing
from stretto.trackers import RunDescription
from stretto.trackers import find as find_trackers
from stretto.trainer.feed import Batch, Needs, Rows
from stretto.trainer.fit import Loop, Position, derive_seed
from stretto.trainer.tracking import Tracking, bubble_of, drawing_of
from stretto.trainer.trainer import Trainer

SHOWN_ROWS = 64  # of a minibatch with an example that cannot be trained
TIMEOUT = 600.0  # seconds that workers wait for each other unless said otherwise
OnStep = Callable[[int, float | None], None]  # (steps done, latest known training loss)


def feed_of(prepared: Prepared) -> Rows:
    """The minibatches of a run, all of them full; every process reads them."""
    settings, loaded = prepared.settings, prepared.dataset
    needs, seed = Needs(x=True, y=True), derive_seed(settings.seed)
    return Rows(loaded.train, loaded.name, known(settings.batch_size), needs, shuffled=True, drop_last=True, seed=seed)


def training_batches(prepared: Prepared) -> Iterator[tuple[Any, Any]]:
    """The endless minibatches of a run, in its order."""
    feed = feed_of(prepared)
    return ((x, y) for number in itertools.count() for _, x, y in feed.epoch(number))


@dataclass(frozen=True)
class Task:
    """One run, the folder for it, and how it is made: none of that changes its numbers.

    `trace` records what each worker does, and when; `operations` also what runs inside the actions of some steps.
    `costs` are measured if they are not given, for which this process needs all stages. `resume` goes on from the
    newest checkpoint that is whole, if there is one. No process waits for another one longer than `timeout` seconds. A
    run that is asked to stop before its last step saves a checkpoint first if it `keeps` its state or its settings save
    checkpoints anyway. Energy is measured, where it can be, if the run is `alone` on its machine. `objects` is a file
    with the objects that a script has given instead of names. `warned` names what a trial of it has warned of already.
    """

    settings: TrainSettings
    folder: Path
    timeout: float = TIMEOUT
    trace: bool = False
    operations: bool = False
    costs: Costs | None = None
    resume: bool = False
    keeps: bool = False
    alone: bool = True
    objects: Path | None = None
    warned: frozenset[str] = frozenset()


def run(settings: TrainSettings, folder: Path, on_step: OnStep = lambda *_: None, **options: Any) -> Record:
    """Make a run with these (resolved) settings; `options` are the other fields of a `Task`."""
    return make_run(Task(settings, folder, **options), on_step)


def make_run(task: Task, on_step: OnStep = lambda *_: None, prepared: Prepared | None = None) -> Record:
    """Train as a task's settings say and write run.json, events.jsonl and model.safetensors into its folder.

    A loss that is not finite ends the run as diverged. On several processes it is a collective: all train, the first
    one writes. Raises KeyboardInterrupt for a run that has been asked to stop. A trainer that is `prepared` already has
    not trained yet.
    """
    if prepared is None:
        forget_most_held()
        prepared = prepare(task.settings, task.timeout)
        prepared.trainer.backend.means.warned = task.warned
    return TrainingRun(task, prepared).make(on_step)


def counting(advance: Callable[[int], object]) -> OnStep:
    """Call `advance` with the number of new steps, where the number of all is told."""
    done = 0

    def on_step(step: int, _: float | None) -> None:
        nonlocal done
        advance(step - done)
        done = step

    return on_step


class TrainingRun(Loop[Trainer]):
    """A run while it is made, by `make`: trained from where its progress is, which is kept up to date and written."""

    _feed: Rows
    _writer: RunWriter
    _progress: Progress
    _meter: EnergyMeter
    _profile: OperationProfile
    _on_step: OnStep

    def __init__(self, task: Task, prepared: Prepared) -> None:
        settings = prepared.settings
        self._task, self._prepared, self._settings = task, prepared, settings
        self._costs = costs_of(prepared) if task.costs is None else task.costs
        self._checkpoints = Checkpoints(settings, task.folder)
        every = settings.checkpoint_every
        super().__init__(prepared.trainer, saves=task.keeps or every is not None, save_every=every)
        self._feed = feed_of(prepared)
        self._recordings = self._trainer.record() if task.trace or task.operations else []
        self._steps = known(settings.steps)
        self._evaluated = evaluation_steps(self._steps, known(settings.evaluations))
        observed = self._trainer.processes == 1 and not is_model_folder(settings.model)  # it takes copies of all stages
        self._windows = ObservationWindows(self._trainer, self._steps) if observed else None
        self._measurer, self._bleu = Measurer(prepared, self._evaluated), Bleu(prepared)
        self._metrics = metrics_of(settings)

    def make(self, on_step: OnStep) -> Record:
        """Train until all steps are made or a loss is not finite, and write the results; a collective."""
        trainer, task = self._trainer, self._task
        with (
            trainer.backend.abort_all_on_error(),
            RunWriter(task.folder, trainer.rank, trainer.processes, resume=task.resume) as self._writer,
        ):
            self._begin()
            self._on_step = on_step
            with self._listening(), self._tracked() as self._tracking:
                self._meter.start()
                if self._train():
                    raise KeyboardInterrupt(f"stopped after step {self._place.step}, which is saved")
                if self._progress.diverged_at is None:
                    last = self._progress.points[-1]
                    self._progress.final = final_scores(self._prepared, last, self._bleu, self._metrics)
                self._tracking.evaluation(self._progress.steps, test_scores(self._progress))
                self._progress.tracker_ids = self._tracking.for_checkpoint()
                record = self._record()
                self._write_results(record)
                if trainer.rank == 0:
                    self._checkpoints.clear()
        return record

    def _begin(self) -> None:
        # Find out where the run stands, and write its first events; those of a resumed run's earlier steps again.
        trainer, writer = self._trainer, self._writer
        saved, complaints = self._checkpoints.load(trainer) if self._task.resume else (None, [])
        progress = self._progress = Progress() if saved is None else saved
        self._place = Position(*divmod(progress.steps, self._feed.per_epoch), progress.steps)
        self._losses, self._told = [math.nan] * progress.steps, progress.steps
        progress.meter = meter_of(self._prepared) if self._task.alone else None
        self._meter = progress.meter or EnergyMeter(())
        ramp = trainer.schedule.drain + 1
        profiled = profiled_steps(progress.steps, self._steps, ramp) if self._task.operations else range(0)
        self._profile = OperationProfile(trainer, self._recordings, profiled)
        stages = [index for index, stage in enumerate(trainer.stages) if not isinstance(stage, RemoteStage)]
        where: dict[str, Any] = dict(zip(("replica", "worker"), trainer.placement.at(trainer.rank), strict=True))
        where |= {"stages": stages, "device": name_of(trainer.device)}
        writer.worker_event("start", rank=trainer.rank, pid=os.getpid(), host=socket.gethostname(), **where)
        writer.event("start", id=self._settings.id, settings=self._settings.to_json())
        if progress.steps or complaints:
            writer.event("resume", step=progress.steps, skipped=complaints)
            writer.worker_event("resume", step=progress.steps, skipped=complaints)
        stored: tuple[Sequence[Stored], ...] = (progress.observations, progress.points, progress.measurements)
        for kind, earlier in zip(("observation", "evaluation", "measurement"), stored, strict=True):
            for each in earlier:
                writer.event(kind, **each.to_json())

    @contextmanager
    def _tracked(self) -> Iterator[Tracking]:
        # The run in the trackers of its settings: a new one, or that of the checkpoint which it goes on from.
        settings, folder = self._settings, self._task.folder
        study = folder.absolute().parent.parent
        description = RunDescription(
            name=folder.name,
            settings=settings.to_show() | {"bubble": bubble_of(self._trainer) if settings.log else None},
            schedule=drawing_of(self._trainer) if settings.log else "",
            group=study.name if (study / STUDY).is_file() else None,
            ids=self._progress.tracker_ids,
            since=self._progress.steps,
        )
        tracking = Tracking(
            self._trainer,
            find_trackers(settings.log),
            description,
            lambda text: print(f"stretto: {text}", file=sys.stderr, flush=True),
        )
        finished = False
        try:
            yield tracking
            finished = self._progress.diverged_at is None
        finally:
            tracking.close(finished=finished)

    def _over(self) -> bool:
        return self._progress.diverged_at is not None or self._place.step == self._steps

    def _step(self, batch: Batch) -> None:
        step, progress = self._place.step + 1, self._progress
        with self._profile.around(step), naming_rows(self._rows):
            loss = self._timed_step(step, batch)
        self._on_step(step, loss)
        finite = loss is None or math.isfinite(loss)
        if finite:
            self._observe(step)
        if not finite or (step in self._evaluated and not self._evaluate(step)):
            progress.diverged_at = step

    def _rows(self) -> str:
        # Which rows are trained; with a lag they may be those of an earlier step.
        if self._trainer.lag:
            return f"data {self._prepared.dataset.name}, train"
        rows = sorted(self._feed.rows(self._place.epoch, self._place.batch))
        more = " ..." if len(rows) > SHOWN_ROWS else ""
        return (
            f"data {self._prepared.dataset.name}, train, one of the rows {', '.join(map(str, rows[:SHOWN_ROWS]))}{more}"
        )

    def _timed_step(self, step: int, batch: Batch) -> float | None:
        # Returns the loss that is known now, which may be that of an earlier step.
        before = time.perf_counter()
        if self._windows is not None:
            self._windows.before(step)
        loss = self._train_on(batch)
        if step == self._steps or self._is_save_due(step):
            self._trainer.flush()
        seconds = time.perf_counter() - before
        self._progress.step_seconds.append(seconds)
        self._meter.tick()
        self._tell(batch.examples / seconds)
        return loss

    def _observe(self, step: int) -> None:
        observation = None if self._windows is None else self._windows.after(step)
        if observation is not None:
            self._progress.observations.append(observation)
            self._writer.event("observation", **observation.to_json())

    def _evaluate(self, step: int) -> bool:
        # Whether the losses are finite.
        progress, writer = self._progress, self._writer
        with self._meter.paused(), self._trainer.pausing("evaluation"):
            seconds = sum(progress.step_seconds)
            point = evaluate(self._prepared, self._costs, step, seconds, self._bleu, self._metrics)
            if point is None:
                return False
            point = replace(point, joules=progress.joules)
            progress.points.append(point)
            writer.event("evaluation", **point.to_json())
            writer.worker_event("evaluation", step=step, seconds=point.seconds)
            self._tracking.evaluation(step, scores_of(point))
            measurement = self._measurer.measure(step)
        if measurement is not None:
            progress.measurements.append(measurement)
            writer.event("measurement", **measurement.to_json())
        return True

    def _end_epoch(self, after: Position) -> None: ...

    def _save(self) -> None:
        step = self._place.step
        with self._meter.paused():
            self._flush()
            self._tracking.settle()
            self._progress.tracker_ids = self._tracking.for_checkpoint()
            path = self._checkpoints.save(self._trainer, step, self._progress.to_json())
        self._writer.worker_event("checkpoint", step=step, path=str(path))

    def _write_results(self, record: Record) -> None:
        # Write the last event, traces and weights of a run that has ended, and give it its folder; a collective.
        trainer, writer = self._trainer, self._writer
        order = trainer.order()
        if order is not None:  # in which a parameter server updated
            writer.event("order", stages=order.to_json())
        writer.event(record.status, step=self._progress.steps, **self._progress.final)
        writer.traces(self._recordings)
        weights = self._write_or_gather()  # a collective: afterwards every process has written its files
        memory = trainer.peak_memory()
        if weights is not None and memory is not None:
            writer.finish(self._run_json(record, memory), *weights)

    def _write_or_gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        # On rank 0 the trained weights, and those of heads, for files of their own; None elsewhere. Of a Hugging Face
        # model each process writes its own stages, as a folder that from_pretrained reads.
        prepared, writer = self._prepared, self._writer
        if not is_model_folder(self._settings.model):
            weights = self._trainer.gather()
            if weights is None:
                return None
            # a user's own module has no place for heads; those of other networks are in one file
            heads = {k: v for k, v in weights.items() if k.startswith("heads.")} if prepared.is_users else {}
            return prepared.named(weights), heads
        stages, module = prepared.stages, prepared.model.module
        assert isinstance(stages, Stages)
        assert module is not None
        with writing(writer.folder):
            written = self._trainer.write_weights(writer.model_folder, stages.name_in_model)
            if written is None:
                return None
            write_surroundings(self._settings.model, module, writer.model_folder)
        return {}, written

    def _run_json(self, record: Record, peak_memory: Sequence[int]) -> dict[str, Any]:
        # The content of run.json; `peak_memory` is in bytes, of each process.
        prepared, costs, tracker_ids = self._prepared, self._costs, self._progress.tracker_ids
        return {
            "settings": self._settings.to_json(),
            "versions": versions(),
            "model": prepared.model.description,
            "dataset": prepared.dataset.description,
            "mesh": self._trainer.placement.axes,
            "accounting": costs.accounting,
            "flops_per_example": {f"{stage}{kind}": value for (kind, stage), value in costs.flops.items()},
            "seconds_per_step": record.seconds_per_step,
            "peak_memory": [None if most < 0 else most for most in peak_memory],
            **({"trackers": tracker_ids} if tracker_ids else {}),
            "record": {**record.to_json(), "points": [], "observations": [], "measurements": []},
        }

    def _record(self) -> Record:
        # As the report and `--json` show the run; a collective, as the slowest process sets the pace.
        settings, progress, costs = self._settings, self._progress, self._costs
        steady = progress.step_seconds[known(settings.stages) :]  # with a full pipeline
        rate = {} if settings.lr is None else {"lr": settings.lr}
        median = statistics.median(steady or progress.step_seconds)
        named = map(parse_metric, settings.metric)
        if self._trainer.sync.serving is not None:
            self._trainer.flush()  # a server's staleness bound may make one process wait for an update of another
        return Record(
            id=settings.id,
            method=settings.method,
            seed=settings.seed,
            options={**rate, "batch_size": settings.batch_size},
            status="finished" if progress.diverged_at is None else "diverged",
            diverged_at=progress.diverged_at,
            points=tuple(progress.points),
            observations=tuple(progress.observations),
            measurements=tuple(progress.measurements),
            total_flops=progress.steps * known(settings.batch_size) * costs.total,
            serial_flops=costs.serial_after(progress.steps),
            seconds=sum(progress.step_seconds),
            seconds_per_step=self._trainer.backend.all_reduce_max([median])[0],
            device=name_of(self._trainer.device),
            threads=torch.get_num_threads(),
            higher_is_better=tuple(name for name, _, higher in named if higher),
            energy_source="" if progress.meter is None or progress.joules is None else progress.meter.source,
            **progress.final,
        )


def meter_of(prepared: Prepared) -> EnergyMeter | None:
    """On the first process a meter of this machine's energy, if all processes are on it; None elsewhere."""
    trainer = prepared.trainer
    if trainer.rank > 0 or (trainer.processes > 1 and not is_one_machine(os.environ)):
        return None
    if trainer.processes == 1:
        return energy_meter([trainer.device])
    return energy_meter({pick_device_of(prepared.settings.device, rank) for rank in range(trainer.processes)})
