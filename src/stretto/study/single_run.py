"""A single run, outside a study."""

import glob
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from stretto.errors import UsageError
from stretto.methods.advice import may_stand_for
from stretto.methods.table import is_advised
from stretto.report import units
from stretto.report.record import Record
from stretto.settings.runs import TrainSettings, known, short
from stretto.study.checkpoints import Checkpoints
from stretto.study.prepare import Prepared
from stretto.study.store import CHECKPOINTS, RUN, check_run_folder, read_run, refuse_full, refuse_other
from stretto.system.destinations import followed
from stretto.system.path_names import in_path
from stretto.tracing import Recording, read_recordings
from stretto.tracing.operation_spans import OPERATION

FILES_BYTES = 2**16  # of what a run leaves beside its weights, about
Resume: TypeAlias = bool | Literal["auto"]
"""Whether a run goes on from its newest checkpoint; "auto" begins where there is none."""


class Claim(NamedTuple):
    """Whether a run is `made` already, else the step that it goes on after, 0 where it begins; and that in words."""

    made: bool
    step: int
    told: str


def default_folder(settings: TrainSettings) -> Path:
    """A folder named after everything the run depends on, so that the same run has the same folder."""
    name = f"train-{short(settings.model)}-{short(known(settings.data))}-{settings.id}-{settings.digest}"
    return Path("runs") / in_path(name, "the name of the run's folder")


def as_begun(asked: str, settings: TrainSettings, out: Path | None) -> TrainSettings:
    """Resolved settings of a run that goes on; what was `asked` as "async" or "local" is the method it began with.

    The advice may have changed since. Without the run's folder `out`, folders with checkpoints of such runs are tried.
    """
    if not is_advised(asked):
        return settings
    for folder in [default_folder(settings), *folders_begun(settings)] if out is None else [out]:
        begun = Checkpoints(settings, folder).method_begun()
        if begun is not None and may_stand_for(asked, begun):
            same = replace(settings, method=begun)
            if out is not None or default_folder(same) == folder:
                return same
    return settings


def folders_begun(settings: TrainSettings) -> list[Path]:
    """The folders of runs of the same model on the same data, without --out, that have checkpoints."""
    prefix = default_folder(settings).name.partition(settings.id)[0]
    found = sorted(Path("runs").glob(f".{glob.escape(prefix)}*.{CHECKPOINTS}"))
    return [path.with_name(path.name.removeprefix(".").removesuffix(f".{CHECKPOINTS}")) for path in found]


def claim(folder: Path, settings: TrainSettings, *, resume: Resume = False) -> Claim:
    """What is still to be made of the run.

    Raises UsageError if the folder holds anything else; if the run has checkpoints and `resume` is false; if it has
    none and `resume` is true; and if they are another run's.
    """
    if (folder / RUN).is_file():
        refuse_other(folder, "a run", read_run(folder)[0]["settings"], settings.to_json())
        Checkpoints(settings, folder).clear()  # the run may have ended since they were looked for
        return Claim(made=True, step=0, told=f"{folder}: this run is finished already")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already and holds no run: choose another --out")
    check_run_folder(folder)
    checkpoints = Checkpoints(settings, folder)
    if resume:
        return Claim(False, *checkpoints.find(required=resume != "auto"))
    checkpoints.refuse_to_overwrite()
    return Claim(made=False, step=0, told="")


def refuse_full_disk(prepared: Prepared, folder: Path) -> None:
    """Raise FullDiskError where the weights of a run would have no room in the end."""
    weights = {id(each): each.nbytes for layer in prepared.model.layers for each in layer.parameters()}
    refuse_full(followed(folder), "a run", sum(weights.values()) + FILES_BYTES)


def traced(folder: Path, *, operations: bool = False) -> list[Recording]:
    """The recordings of the run's workers. Raises UsageError for a run without a trace, or one without operations."""
    recordings = read_recordings(folder)
    if not recordings:
        raise UsageError(f"the run in {folder} was made without --trace: delete it, or choose another --out")
    if operations and not any(span.lane == OPERATION for each in recordings for span in each.spans):
        raise UsageError(
            f"the run in {folder} was traced without --trace-operations: delete it, or choose another --out"
        )
    return recordings


def summary(run: dict[str, Any], record: Record, folder: Path) -> dict[str, Any]:
    """The object that `stretto train --json` prints."""
    last = record.points[-1].step if record.points else 0
    return {
        "status": record.status,
        "steps": last if record.diverged_at is None else record.diverged_at,
        "seconds_per_step": run.get("seconds_per_step"),
        "peak_memory": run.get("peak_memory"),
        "train_loss": record.train_loss,
        "train_accuracy": record.train_accuracy,
        "validation_loss": record.validation_loss,
        "validation_accuracy": record.validation_accuracy,
        "validation_bleu": record.validation_bleu,
        "test_loss": record.test_loss,
        "test_accuracy": record.test_accuracy,
        "test_bleu": record.test_bleu,
        **record.metric_scores,
        "total_flops": record.total_flops,
        "serial_flops": record.serial_flops,
        "out": str(folder),
    }


def in_words(figures: Mapping[str, Any]) -> str:
    """A run's summary as people read it, a figure a line: three digits, compute and memory with units."""
    known_figures = {key: value for key, value in figures.items() if value is not None}
    width = max(map(len, known_figures))
    return "\n".join(f"{key:<{width}} {with_unit(key, value)}" for key, value in known_figures.items())


def with_unit(key: str, value: Any) -> str:
    """A value of a run's summary as text."""
    if key == "peak_memory":
        return ", ".join("unknown" if most is None else units.bytes_held(most) for most in value)
    if not isinstance(value, float):
        return f"{value}"
    return units.flops(value) if key.endswith("_flops") else f"{value:.3g}"
