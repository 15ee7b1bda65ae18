"""The pages of a study, and where they go: its report, `stretto inspect`, and trackers, which keep the report.

The report gathers its runs, schedules, delays and traces; inspected are the best runs of each method on validation.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from stretto.cost import Cluster
from stretto.errors import UsageError
from stretto.heads.head import First
from stretto.nn.shapes import summary
from stretto.options.extras import missing
from stretto.report import Record, build, summarize
from stretto.report.measures import Tariff
from stretto.report.prediction import PredictedRun, compare_with_prediction
from stretto.report.recorded_run import RecordedRun, timelines
from stretto.settings.runs import TrainSettings, known
from stretto.study.predicted_runs import phases_of, predict, recorded_run, recordings_of, seconds_per_step
from stretto.study.prepare import Prepared, prepare_trial
from stretto.study.store import read_run, writing
from stretto.study.study import Study, delays, describe, names, prepared_trials, read_study, record_of
from stretto.study.training_run import Task
from stretto.tracing import Recording
from stretto.tracing.run_phases import RunPhase
from stretto.trackers import RunDescription, Tracker, find
from stretto.trackers.tracker import TrackedRun

if TYPE_CHECKING:
    from stretto.report.inspection import InspectedRun


@dataclass(frozen=True)
class TracedRun:
    """A run with a trace, as it was prepared, and its recordings."""

    task: Task
    prepared: Prepared
    recordings: Sequence[Recording]

    @cached_property
    def recorded(self) -> RecordedRun:
        """The run as the report compares it with simulations."""
        return recorded_run(self.prepared, self.recordings)

    @property
    def phases(self) -> dict[str, list[RunPhase]]:
        """Its phases, for a track of its trace."""
        return phases_of(self.prepared, self.recordings)

    def compared(self, cluster: Cluster | None) -> PredictedRun | None:
        """The run compared with its prediction; None if it is not finished, or too short."""
        record = record_of(self.task)
        if record is None:
            return None
        prediction = predict(self.prepared, self.recorded, cluster)
        paused = [point.step for point in record.points]
        return compare_with_prediction(self.recorded, prediction, paused=paused, held=most_held(record))


PAGE = "report.html"


def write_report(study: Study, command: str = "", *, cluster: Cluster | None = None) -> Path:
    """Write report.html from the finished runs and return its path.

    Traced runs are compared with predictions: from costs on a `cluster` alone, or else from their own action times.
    """
    prepared = prepared_trials(study) if study.page is None else {}
    page = describe(study, prepared) if study.page is None else study.page
    traced, records = tuple(traced_runs(study, prepared)), study.records()
    page = replace(
        page,
        records=records,
        command=command,
        tariffs={} if cluster is None else tariffs(study, records, prepared, cluster),
        timelines=tuple(shown for run in traced if (shown := timelines(run.recorded)) is not None),
        predicted=tuple(compared for run in traced if (compared := run.compared(cluster)) is not None),
    )
    with writing(study.out):
        return build(page, study.out / PAGE)


def tariffs(
    study: Study, records: Sequence[Record], prepared: Mapping[str, Prepared], cluster: Cluster
) -> dict[str, Tariff]:
    """{method: what the workers of its best run take}; empty if the cluster has neither power nor price for them.

    Raises UsageError if the cluster has too few workers, or an emulated run cannot be predicted there.
    """
    tasks = {task.settings.id: task.settings for task in study.tasks}
    chosen = {summary.method: summary.chosen for summary in summarize(records) if summary.chosen is not None}
    return {
        method: found
        for method, record in chosen.items()
        if (found := tariff(tasks[record.id], prepared, cluster)) is not None
    }


def tariff(run: TrainSettings, prepared: Mapping[str, Prepared], cluster: Cluster) -> Tariff | None:
    """What the workers of a run take on the first devices of a cluster; see `tariffs`."""
    ready = prepared_for(run, prepared)
    trainer = ready.trainer
    own = (trainer.placement.replicas_of(worker) for worker in range(trainer.schedule.num_workers))
    workers = range(run.workers) if run.workers else sorted(itertools.chain.from_iterable(own))
    watts, price = cluster.watts(workers), cluster.price_per_hour(workers)
    if watts is None and price is None:
        return None
    step = None if run.workers else seconds_per_step(ready, cluster)
    return Tariff(cluster=f"cluster {cluster.name!r}", watts=watts, price_per_hour=price, seconds_per_step=step)


PREPARED_ALIKE = ("bounds", "data_parallel", "tensor", "space", "sync", "batch_size")


def prepared_for(run: TrainSettings, prepared: Mapping[str, Prepared]) -> Prepared:
    """The prepared run of the same method if it has the same shapes and axes; else this run, prepared."""
    candidate = prepared.get(run.method)
    if candidate is None or any(getattr(candidate.settings, key) != getattr(run, key) for key in PREPARED_ALIKE):
        return prepare_trial(run)
    return candidate


def traced_runs(study: Study, prepared: Mapping[str, Prepared]) -> Iterator[TracedRun]:
    """The runs of a study that have a trace."""
    for task in study.tasks:
        recordings = recordings_of(task.folder, task.settings)
        if recordings:
            yield TracedRun(task, prepared_for(task.settings, prepared), recordings)


def most_held(record: Record) -> dict[str, list[float]]:
    """{"weights" and "activations": the most bytes of each stage}; empty if the run was not observed."""
    observed = {
        "weights": [o.weight_bytes for o in record.observations],
        "activations": [o.activation_bytes for o in record.observations],
    }
    return {what: [max(column) for column in zip(*rows, strict=True)] for what, rows in observed.items() if rows}


INSPECTION = "inspect.html"


def inspect_study(study: Study) -> "tuple[InspectedRun, ...]":
    """The best run of each method; methods without a finished run are left out."""
    chosen = [summary.chosen for summary in summarize(study.records())]
    return tuple(inspected(study, record) for record in chosen if record is not None)


def inspected(study: Study, record: Record) -> "InspectedRun":
    """Describe a run: its stages, its heads, and the delay of its gradients by stage."""
    from stretto.report.inspection import InspectedRun  # it imports altair

    prepared = prepare_trial(next(task.settings for task in study.tasks if task.settings.id == record.id))
    trainer = prepared.trainer
    kind = trainer.method.head
    heads = ["" if head is None else description(head) if kind == "auto" else kind for head in trainer.heads]
    heads[-1] = "its output"
    for tie in (tie for tie in trainer.rules.ties if tie.owner > tie.user):  # versions that travel down
        heads[tie.user] += f", {tie.behind[0]} minibatches behind"
    return InspectedRun(
        record=record, stages=tuple(map(description, trainer.stages)), heads=tuple(heads), delays=delays(prepared)
    )


def description(module: nn.Module) -> str:
    """A stage or a head in a few words; a container of one module is described as that module."""
    while isinstance(module, nn.Sequential | First) and len(children := list(module.children())) == 1:
        (module,) = children
    return summary(module).removeprefix("Sequential of ")


def write_inspection(study: Study, runs: "tuple[InspectedRun, ...]") -> Path:
    """Write the page into the study's folder and return its path."""
    from stretto.report.inspection import build_inspection

    settings = study.settings
    title = f"Inside {settings.model} on {settings.data}: {names([run.record.method for run in runs])}"
    facts = {
        "Model": f"{settings.model}, {settings.stages} stages",
        "Data": known(settings.data) + "".join(f", {key} {value}" for key, value in settings.data_options.items()),
        "Runs": f"{len(runs)}, the best of each method on validation",
    }
    with writing(study.out):
        return build_inspection(study.out / INSPECTION, title=title, inspected=runs, facts=facts)


PICTURES = ("frontier.svg", "frontier.png")


def prepare_trackers(study: Study) -> None:
    """Do, before the runs of a study, what trackers do once; one that fails is told by the runs."""
    for tracker in find(study.settings.log):
        try:
            tracker.prepare(study.out.name)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the study goes on
            tell(f"tracker {tracker.name} could not be prepared ({type(error).__name__}: {error})")


def track_study(study: Study, report: Path) -> None:
    """Add the report of a study to its trackers, as a run of its own beside those of the study."""
    files = [report, *(report.with_name(name) for name in PICTURES if report.with_name(name).is_file())]
    description = RunDescription("report", study.settings.to_show(), group=study.out.name)
    add_files(find(study.settings.log), description, files)


def track_run(folder: Path, settings: TrainSettings) -> None:
    """Add the report of a finished run to the run that its trackers have of it."""
    trackers = find(settings.log)
    run, record = read_run(folder)
    ids: Mapping[str, str] = run.get("trackers", {})
    known = [tracker for tracker in trackers if tracker.name in ids]
    if not known or missing("report"):
        return
    try:
        report = write_report(read_study(folder, settings.functions.values()))
    except UsageError as error:
        tell(f"the run's report is not added to {', '.join(ids)}: {error}")
        return
    description = RunDescription(folder.name, ids=ids, since=settings.steps or 0)  # all of its rows are kept
    add_files(known, description, [report], finished=record.status == "finished")


def add_files(
    trackers: Sequence[Tracker], description: RunDescription, files: Sequence[Path], *, finished: bool = True
) -> None:
    """Open a run in trackers, add files to it, and end it: `finished`, or else as failed."""
    run = TrackedRun(trackers, description, tell)
    for file in files:
        run.add_file(file)
    run.close(finished=finished)


def tell(text: str) -> None:
    """Print a line on stderr."""
    print(f"stretto: {text}", file=sys.stderr, flush=True)
