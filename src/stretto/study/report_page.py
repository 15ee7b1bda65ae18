"""What a study's report is made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.cost import Cluster
from stretto.measure import NOTES
from stretto.measure.flops import durations
from stretto.report import Page, Record, build
from stretto.report.predicted import PredictedRun, compare_with_prediction
from stretto.report.turns import Timelines, timelines
from stretto.schedule import draw
from stretto.settings.runs import TrainSettings
from stretto.simulate import simulate
from stretto.study.disk_errors import writing
from stretto.study.prediction import full_turns, predict, recordings_of
from stretto.study.prepare import Prepared, costs_of, prepare
from stretto.study.process_pool import Task
from stretto.study.store import versions
from stretto.study.study import Study, record_of, sample
from stretto.tracing import Recording

MOST_NAMES = 8  # of methods in a title
HEADS_NOTE = (
    "The layers of the paper's auxiliary heads could not be retrieved; these are ours: one linear layer on vectors, "
    "global average pooling and a linear layer on images, a final norm and an unembedding on text; other heads are "
    "named in their method. Their cost is included."
)


@dataclass(frozen=True)
class Trail:
    """What a run with a trace has left, read once."""

    task: Task
    prepared: Prepared
    recordings: Sequence[Recording]


def write_report(study: Study, command: str = "", *, cluster: Cluster | None = None) -> Path:
    """One HTML page from the runs that are finished. On a `cluster` traced runs are predicted from costs alone."""
    settings = study.settings
    prepared = {method: prepare(sample(settings, method)) for method in settings.methods}
    first = next(iter(prepared.values()))
    workers = f"{settings.workers} workers" if settings.workers else "as many workers as suit each method"
    automatic = f"{settings.model} on {settings.data}: {names(settings.methods)}"
    trails = tuple(traced(study, prepared))
    heads = any(head is not None for each in prepared.values() for head in each.trainer.heads)
    page = Page(
        title=study.heading.text if study.heading else automatic,
        heading=study.heading,
        records=study.records(),
        planned=len(study.tasks),
        accounting=settings.accounting,
        accounting_note=NOTES[costs_of(first).accounting],
        dataset=first.dataset.description,
        model=f"{first.model.description}; {settings.stages} stages on {workers}",
        heads_note=HEADS_NOTE if heads else "",
        settings=settings.to_json(),
        versions=versions(),
        pictures={method: picture(each) for method, each in prepared.items()},
        delays={method: delays(each) for method, each in prepared.items()},
        processes=study.tasks[0].settings.workers or 0,
        timelines=tuple(each for trail in trails if (each := timed(trail)) is not None),
        predicted=tuple(told for trail in trails if (told := foretold(trail, cluster)) is not None),
        left_out=study.left_out,
        command=command,
    )
    with writing(study.out):
        return build(page, study.out / "report.html")


def names(methods: Sequence[str]) -> str:
    """The methods, for a title: by name while a title can hold them."""
    return ", ".join(methods) if len(methods) <= MOST_NAMES else f"{len(methods)} methods"


def delays(prepared: Prepared) -> tuple[int, ...]:
    """How old gradients are in the steady state, by stage, in updates."""
    trainer = prepared.trainer
    return trainer.method.delays(trainer.schedule).steady


SHAPING = ("bounds", "data_parallel", "tensor", "space", "sync", "batch_size")


def own(prepared: Mapping[str, Prepared], run: TrainSettings) -> Prepared:
    """A run as it was prepared: like the others of its method, but for one outside a study with axes of its own."""
    each = prepared[run.method]
    same = all(getattr(each.settings, key) == getattr(run, key) for key in SHAPING)
    return each if same else prepare(run)


def traced(study: Study, prepared: Mapping[str, Prepared]) -> Iterator[Trail]:
    """The runs that left traces, each with its recordings, as it was prepared."""
    for task in study.tasks:
        recordings = recordings_of(task.folder, task.settings)
        if recordings:
            yield Trail(task, own(prepared, task.settings), recordings)


def timed(trail: Trail) -> Timelines | None:
    """The timelines of a run."""
    run, trainer = trail.task.settings, trail.prepared.trainer
    among = full_turns(trail.prepared)
    return timelines(run.id, run.method, trail.recordings, trainer.schedule, trainer.rules, among=among)


def foretold(trail: Trail, cluster: Cluster | None) -> PredictedRun | None:
    """A run against what was predicted of it, if it is finished."""
    run, record, trainer = trail.task.settings, record_of(trail.task), trail.prepared.trainer
    if record is None:
        return None
    return compare_with_prediction(
        run.id, run.method, trail.recordings, trainer.schedule, trainer.rules,
        predict(trail.prepared, trail.recordings, cluster), paused=[point.step for point in record.points],
        held=most_held(record), among=full_turns(trail.prepared),
    )  # fmt: skip


def most_held(record: Record) -> dict[str, list[float]]:
    """The most bytes that each stage was seen to hold, if the run was observed."""
    seen = {"weights": [o.weight_bytes for o in record.observations],
            "activations": [o.activation_bytes for o in record.observations]}  # fmt: skip
    return {what: [max(column) for column in zip(*rows, strict=True)] for what, rows in seen.items() if rows}


def picture(prepared: Prepared, turns: int = 3) -> str:
    """The method's schedule to scale, with the costs of the run as durations."""
    trainer, costs = prepared.trainer, costs_of(prepared)
    megaflops = {key: value / 1e6 for key, value in costs.flops.items()}
    timeline = simulate(trainer.schedule, trainer.rules, turns, durations(megaflops))
    return draw.svg(timeline.spans, title=f"{trainer.method}: the first {turns} minibatches, to scale (MFLOP)")
