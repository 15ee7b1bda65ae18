"""What `stretto inspect` looks at: of every method of a study the run that is best on validation."""

from pathlib import Path

from torch import nn

from stretto.heads.head import First
from stretto.nn.shapes import summary
from stretto.report import summarize
from stretto.report.inspection import InspectedRun, build_inspection
from stretto.report.record import Record
from stretto.study.disk_errors import writing
from stretto.study.prepare import prepare
from stretto.study.report_page import delays, names
from stretto.study.study import Study

PAGE = "inspect.html"


def inspect_study(study: Study) -> tuple[InspectedRun, ...]:
    """Each method's run; those of methods of which no run is finished are left out."""
    chosen = [each.chosen for each in summarize(study.records())]
    return tuple(inspected(study, record) for record in chosen if record is not None)


def inspected(study: Study, record: Record) -> InspectedRun:
    """A run with what its stages and heads are."""
    prepared = prepare(next(task.settings for task in study.tasks if task.settings.id == record.id))
    trainer = prepared.trainer
    named = trainer.method.head
    heads = ["" if head is None else told(head) if named == "auto" else named for head in trainer.heads]
    heads[-1] = "its output"
    for tie in trainer.rules.ties:
        heads[tie.user] += f", {tie.behind[0]} minibatches behind"
    return InspectedRun(
        record=record, stages=tuple(map(told, trainer.stages)), heads=tuple(heads), delays=delays(prepared)
    )


def told(stage: nn.Module) -> str:
    """A stage or a head in a few words; what holds a single module is that module."""
    while isinstance(stage, nn.Sequential | First) and len(inside := list(stage.children())) == 1:
        (stage,) = inside
    return summary(stage).removeprefix("Sequential of ")


def write_inspection(study: Study, found: tuple[InspectedRun, ...]) -> Path:
    """The page, in the study's folder."""
    settings = study.settings
    title = f"Inside {settings.model} on {settings.data}: {names([each.record.method for each in found])}"
    facts = {
        "Model": f"{settings.model}, {settings.stages} stages",
        "Data": settings.data + "".join(f", {key} {value}" for key, value in settings.data_options.items()),
        "Runs": f"{len(found)}, the best of each method on validation",
    }
    with writing(study.out):
        return build_inspection(study.out / PAGE, title=title, inspected=found, facts=facts)
