"""What a study's report is made of."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.cost import NOTES
from stretto.cost.flops import durations
from stretto.report import Page, build
from stretto.report.turns import Timelines, timelines
from stretto.schedule import draw
from stretto.simulate import simulate
from stretto.study.disk import writing
from stretto.study.prepare import Prepared, costs_of, prepare
from stretto.study.store import versions
from stretto.study.study import Study, sample
from stretto.tracing import read_recordings

MOST_NAMES = 8  # of methods in a title
HEADS_NOTE = (
    "The layers of the paper's auxiliary heads could not be retrieved; these are ours: one linear layer on vectors, "
    "global average pooling and a linear layer on images, a final norm and an unembedding on text. Their cost is "
    "included."
)


def write_report(study: Study, command: str = "") -> Path:
    """One HTML page from the runs that are finished."""
    settings = study.settings
    prepared = {method: prepare(sample(settings, method)) for method in settings.methods}
    first = next(iter(prepared.values()))
    workers = f"{settings.workers} workers" if settings.workers else "as many workers as suit each method"
    heads = any(head is not None for each in prepared.values() for head in each.trainer.heads)
    page = Page(
        title=f"{settings.model} on {settings.data}: {names(settings.methods)}",
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
        timelines=traced(study, prepared),
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


def traced(study: Study, prepared: Mapping[str, Prepared]) -> tuple[Timelines, ...]:
    """The timelines of the runs that left traces."""
    found = []
    for task in study.tasks:
        recordings = read_recordings(task.folder)
        if recordings:
            trainer, run = prepared[task.settings.method].trainer, task.settings
            if run.stage_workers is not None:  # those of replica 0, one of each worker's
                recordings = recordings[:: run.mesh.inside][: run.stage_workers]
            phases = trainer.method.phases
            among = range(phases.warmup, sys.maxsize if phases.finish is None else phases.finish)
            found.append(timelines(run.id, run.method, recordings, trainer.schedule, trainer.rules, among=among))
    return tuple(each for each in found if each is not None)


def picture(prepared: Prepared, turns: int = 3) -> str:
    """The method's schedule to scale, with the costs of the run as durations."""
    trainer, costs = prepared.trainer, costs_of(prepared)
    megaflops = {key: value / 1e6 for key, value in costs.flops.items()}
    timeline = simulate(trainer.schedule, trainer.rules, turns, durations(megaflops))
    return draw.svg(timeline.spans, title=f"{trainer.method}: the first {turns} minibatches, to scale (MFLOP)")
