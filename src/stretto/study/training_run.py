"""One run: from its trainer to its folder."""

import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.measure import Costs
from stretto.measure.energy import EnergyMeter, energy_meter
from stretto.models.hugging_face import write_surroundings
from stretto.nn.deferred import RemoteStage
from stretto.nn.devices import name_of, pick_device_of
from stretto.options.import_object import is_model_folder
from stretto.processes.stop_request import StopRequest
from stretto.report.record import Record
from stretto.runtime.process_memory import forget_most_held
from stretto.runtime.world import is_one_machine
from stretto.settings.runs import TrainSettings, known, parse_metric
from stretto.splitting import Stages
from stretto.study.checkpoints import Checkpoints
from stretto.study.disk_errors import writing
from stretto.study.evaluation import test_scores
from stretto.study.prepare import Prepared, costs_of, prepare
from stretto.study.run_progress import Progress
from stretto.study.store import STUDY, RunWriter, versions
from stretto.study.training_loop import OnStep, TrainingLoop
from stretto.tracing import Recording
from stretto.trackers import RunDescription
from stretto.trackers import find as find_trackers
from stretto.trainer.tracking import Tracking, bubble_of, drawing_of


def counting(advance: Callable[[int], object]) -> OnStep:
    """Call `advance` with the number of new steps, where the number of all is told."""
    done = 0

    def on_step(step: int, _: float | None) -> None:
        nonlocal done
        advance(step - done)
        done = step

    return on_step


def run(
    settings: TrainSettings,
    folder: Path,
    on_step: OnStep = lambda *_: None,
    *,
    trace: bool = False,
    operations: bool = False,
    costs: Costs | None = None,
    resume: bool = False,
    timeout: float = 600,
    keeps: bool = False,
    alone: bool = True,
) -> Record:
    """Train as the (resolved) settings say and write run.json, events.jsonl and model.safetensors into `folder`.

    A loss that is not finite ends the run as diverged. `trace` also records what each worker did, and when;
    `operations` also what ran inside the actions of some steps. `costs` are measured if they are not given, for which
    this process needs all stages. On several processes it is a collective: all train, the first one writes. `resume`
    goes on from the newest checkpoint that is whole, if there is one. No process waits for another one longer than
    `timeout` seconds. A run that is asked to stop before its last step raises KeyboardInterrupt; it saves a checkpoint
    first if `keeps` is true or its settings save checkpoints anyway. Energy is measured, where it can be, if the run is
    `alone` on its machine.
    """
    forget_most_held()
    return run_prepared(
        prepare(settings, timeout),
        folder,
        on_step,
        trace=trace,
        operations=operations,
        costs=costs,
        resume=resume,
        keeps=keeps,
        alone=alone,
    )


def run_prepared(
    prepared: Prepared,
    folder: Path,
    on_step: OnStep = lambda *_: None,
    *,
    trace: bool = False,
    operations: bool = False,
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
    recordings = trainer.record() if trace or operations else []
    with (
        trainer.backend.abort_all_on_error(),
        RunWriter(folder, trainer.rank, trainer.processes, resume=resume) as writer,
    ):
        saved, complaints = checkpoints.load(trainer) if resume else (None, [])
        progress = Progress() if saved is None else saved
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
            profiled = recordings if operations else None
            TrainingLoop(prepared, costs, progress, checkpoints, request, writer, tracking, profiled).run(on_step)
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
    tracking = Tracking(
        trainer,
        find_trackers(settings.log),
        description,
        lambda text: print(f"stretto: {text}", file=sys.stderr, flush=True),
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


def make_record(prepared: Prepared, costs: Costs, progress: Progress) -> Record:
    """The record of the run, as the report and `--json` show it; a collective, as the slowest process sets the pace."""
    settings, steps = prepared.settings, progress.steps
    steady = progress.step_seconds[known(settings.stages) :]  # with a full pipeline
    rate = {} if settings.lr is None else {"lr": settings.lr}
    options: dict[str, Any] = {**rate, "batch_size": settings.batch_size}
    named = map(parse_metric, settings.metric)
    if prepared.trainer.sync.serving is not None:
        prepared.trainer.flush()  # a server's staleness bound may make one process wait for an update of another
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
        seconds_per_step=prepared.trainer.backend.all_reduce_max([statistics.median(steady or progress.step_seconds)])[
            0
        ],
        device=name_of(prepared.trainer.device),
        threads=torch.get_num_threads(),
        higher_is_better=tuple(name for name, _, higher in named if higher),
        energy_source="" if progress.meter is None or progress.joules is None else progress.meter.source,
        **progress.final,
    )
