"""The runs that `stretto inspect` shows: of every method of a study the one that is best on validation."""

from pathlib import Path

from torch import nn

from stretto.heads.head import First
from stretto.nn.shapes import summary
from stretto.report import summarize
from stretto.report.inspection import InspectedRun, build_inspection
from stretto.report.record import Record
from stretto.settings.runs import known
from stretto.study.disk_errors import writing
from stretto.study.prepare import prepare_trial
from stretto.study.report_page import delays, names
from stretto.study.study import Study

PAGE = "inspect.html"


def inspect_study(study: Study) -> tuple[InspectedRun, ...]:
    """The best run of each method; methods without a finished run are left out."""
    chosen = [summary.chosen for summary in summarize(study.records())]
    return tuple(inspected(study, record) for record in chosen if record is not None)


def inspected(study: Study, record: Record) -> InspectedRun:
    """Describe a run: its stages, its heads, and the delay of its gradients by stage."""
    prepared = prepare_trial(next(task.settings for task in study.tasks if task.settings.id == record.id))
    trainer = prepared.trainer
    kind = trainer.method.head
    heads = ["" if head is None else description(head) if kind == "auto" else kind for head in trainer.heads]
    heads[-1] = "its output"
    for tie in trainer.rules.ties:
        heads[tie.user] += f", {tie.behind[0]} minibatches behind"
    return InspectedRun(
        record=record, stages=tuple(map(description, trainer.stages)), heads=tuple(heads), delays=delays(prepared)
    )


def description(module: nn.Module) -> str:
    """A stage or a head in a few words; a container of one module is described as that module."""
    while isinstance(module, nn.Sequential | First) and len(children := list(module.children())) == 1:
        (module,) = children
    return summary(module).removeprefix("Sequential of ")


def write_inspection(study: Study, runs: tuple[InspectedRun, ...]) -> Path:
    """Write the page into the study's folder and return its path."""
    settings = study.settings
    title = f"Inside {settings.model} on {settings.data}: {names([run.record.method for run in runs])}"
    facts = {
        "Model": f"{settings.model}, {settings.stages} stages",
        "Data": known(settings.data) + "".join(f", {key} {value}" for key, value in settings.data_options.items()),
        "Runs": f"{len(runs)}, the best of each method on validation",
    }
    with writing(study.out):
        return build_inspection(study.out / PAGE, title=title, inspected=runs, facts=facts)
