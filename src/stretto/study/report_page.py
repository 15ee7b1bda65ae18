"""The report of a study: gathers its runs, schedules, delays and traces into a page."""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from stretto.cost import Cluster
from stretto.heads.head import TrainedLoss
from stretto.measure import NOTES
from stretto.measure.flops import durations
from stretto.methods.table import builder
from stretto.options.named import parse
from stretto.report import Page, Record, build, summarize
from stretto.report.expenses import Tariff
from stretto.report.prediction import PredictedRun, compare_with_prediction
from stretto.report.recorded_run import RecordedRun
from stretto.report.turns import timelines
from stretto.schedule import draw
from stretto.settings.runs import TrainSettings
from stretto.simulate import simulate
from stretto.study.disk_errors import writing
from stretto.study.predicted_runs import phases_of, predict, recorded_run, recordings_of, seconds_per_step
from stretto.study.prepare import Prepared, costs_of, prepare_trial
from stretto.study.store import versions
from stretto.study.study import Study, Task, norms_note, record_of, sample
from stretto.tracing import Recording
from stretto.tracing.run_phases import RunPhase

MOST_NAMES = 8  # of methods in a title
HEADS_NOTE = (
    "The layers of the paper's auxiliary heads could not be retrieved; these are ours: one linear layer on vectors, "
    "global average pooling and a linear layer on images, a final norm and an unembedding on text; other heads are "
    "named in their method. Their cost is included."
)


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


def write_report(
    study: Study, command: str = "", *, cluster: Cluster | None = None, described: Page | None = None
) -> Path:
    """Write report.html from the finished runs and return its path.

    Traced runs are compared with predictions: from costs on a `cluster` alone, or else from their own action times.
    `described` is what `describe` returned, if it was called before.
    """
    prepared = prepared_trials(study) if described is None else {}
    page = describe(study, command, prepared) if described is None else described
    traced, records = tuple(traced_runs(study, prepared)), study.records()
    page = replace(
        page,
        records=records,
        tariffs={} if cluster is None else tariffs(study, records, prepared, cluster),
        timelines=tuple(shown for run in traced if (shown := timelines(run.recorded)) is not None),
        predicted=tuple(compared for run in traced if (compared := run.compared(cluster)) is not None),
    )
    with writing(study.out):
        return build(page, study.out / PAGE)


def prepared_trials(study: Study) -> dict[str, Prepared]:
    """The sample run of each method, prepared."""
    return {method: prepare_trial(sample(study.settings, method)) for method in study.settings.methods}


def describe(study: Study, command: str = "", prepared: Mapping[str, Prepared] | None = None) -> Page:
    """The page of a study without its runs: what is known before any of them is made."""
    settings = study.settings
    prepared = prepared_trials(study) if prepared is None else prepared
    first = next(iter(prepared.values()))
    workers = f"{settings.workers} workers" if settings.workers else "as many workers as suit each method"
    automatic = f"{settings.model} on {settings.data}: {names(settings.methods)}"
    heads = any(
        head is not None and not isinstance(head, TrainedLoss)
        for run in prepared.values()
        for head in run.trainer.heads
    )
    return Page(
        title=study.heading.text if study.heading else automatic,
        heading=study.heading,
        records=(),
        planned=len(study.tasks),
        accounting=settings.accounting,
        accounting_note=NOTES[costs_of(first).accounting],
        dataset=first.dataset.description,
        model=f"{first.model.description}; {settings.stages} stages on {workers}",
        heads_note=HEADS_NOTE if heads else "",
        norms_note=norms_note([name for name, run in prepared.items() if run.pieces > 1], first.model.layers),
        settings=settings.to_json(),
        versions=versions(),
        pictures={method: picture(run) for method, run in prepared.items()},
        own_options={method: options_of(method) for method in prepared},
        delays={method: delays(run) for method, run in prepared.items()},
        processes=study.tasks[0].settings.workers or 0,
        left_out=study.left_out,
        command=command,
    )


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


def names(methods: Sequence[str]) -> str:
    """The methods for a title: their names, or their number if there are more than MOST_NAMES."""
    return ", ".join(methods) if len(methods) <= MOST_NAMES else f"{len(methods)} methods"


def options_of(method: str) -> tuple[str, ...]:
    """The names of the options that the method itself takes, as its function in the table of methods has them."""
    return tuple(inspect.signature(builder(parse(method)[0])).parameters)


def delays(prepared: Prepared) -> tuple[int, ...]:
    """The delay of gradients in the steady state, by stage, in updates."""
    trainer = prepared.trainer
    return trainer.method.delays(trainer.schedule).steady


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
    observed = {"weights": [o.weight_bytes for o in record.observations],
                "activations": [o.activation_bytes for o in record.observations]}  # fmt: skip
    return {what: [max(column) for column in zip(*rows, strict=True)] for what, rows in observed.items() if rows}


def picture(prepared: Prepared, turns: int = 3) -> str:
    """An SVG of the method's schedule; the durations of actions are their FLOPs."""
    trainer, costs = prepared.trainer, costs_of(prepared)
    megaflops = {key: value / 1e6 for key, value in costs.flops.items()}
    timeline = simulate(trainer.schedule, trainer.rules, turns, durations(megaflops))
    return draw.svg(timeline.spans, title=f"{trainer.method}: the first {turns} minibatches, to scale (MFLOP)")
