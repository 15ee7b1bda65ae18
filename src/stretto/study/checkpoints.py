"""The state of a run while it trains, and its checkpoints until it has ended, in `.<name>.checkpoints` beside
its folder; the last two are kept.

A finished run has none: its folder holds its weights.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from stretto.checkpoint import newest, prune, read_manifest
from stretto.errors import UsageError
from stretto.measure.energy import EnergyMeter
from stretto.options.kinds import check_values, naming
from stretto.report.record import Measurement, Observation, Point
from stretto.settings.runs import TrainSettings
from stretto.study.store import RUN, checkpoints_of, read_run, refuse_other, writing
from stretto.trainer.trainer import Trainer

KINDS: Mapping[str, Any] = {
    "points": list[dict[str, Any]],
    "observations": list[dict[str, Any]],
    "measurements": list[dict[str, Any]],
    "step_seconds": list[float],
    "joules": float | None,
    "trackers": dict[str, str],
}


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
        """Read what `to_json` wrote. Raises UsageError for values of other kinds."""
        check_values("progress", data, KINDS)
        if lacking := [key for key in ("points", "observations", "step_seconds") if key not in data]:
            raise UsageError(f"progress lacks {', '.join(lacking)}")
        return cls(
            [Point.from_json(point) for point in data["points"]],
            [Observation.from_json(observation) for observation in data["observations"]],
            [Measurement.from_json(measurement) for measurement in data.get("measurements", ())],
            list(data["step_seconds"]),
            joules_before=data.get("joules"),
            tracker_ids=dict(data.get("trackers", {})),
        )


FREE = ("workers", "data_parallel", "space")  # settings that may differ when a run goes on


class Checkpoints:
    """The checkpoints of a run with these settings. `run` is the folder of the run; theirs is beside it."""

    def __init__(self, settings: TrainSettings, run: Path) -> None:
        self._settings = {key: value for key, value in settings.to_json().items() if key not in FREE}
        self._run = run
        self.folder = checkpoints_of(run)

    def save(self, trainer: Trainer, step: int, progress: Mapping[str, Any]) -> Path:
        """Save the trainer, and `progress` as JSON, after a step; a collective. Returns the checkpoint's folder."""
        path = self.folder / f"step-{step}"
        with writing(self.folder):
            trainer.save(path, extra={"settings": self._settings, "progress": progress})
        if trainer.rank == 0:
            prune(self.folder)
        return path

    def load(self, trainer: Trainer) -> tuple[Progress | None, list[str]]:
        """Load the newest checkpoint that is whole into the trainer; a collective.

        Returns the progress saved with it, None without a checkpoint, and sentences on newer ones that are damaged.
        Raises UsageError for a checkpoint of a run with other settings.
        """
        path, complaints = self._newest()
        if path is None:
            return None, complaints
        extra = trainer.load(path)
        with naming(f"{path}"):
            return Progress.from_json(extra["progress"]), complaints

    def _newest(self) -> tuple[Path | None, list[str]]:
        path, complaints = newest(self.folder)
        if path is not None:
            extra = read_manifest(path).extra
            with naming(f"{path}"):
                check_values("extra", extra, {"settings": dict[str, Any], "progress": dict[str, Any]})
                settings = extra["settings"]
            refuse_other(self.folder, "checkpoints of a run", settings, self._settings)
        return path, complaints

    def last(self) -> int | None:
        """The step of the newest checkpoint that is whole; None without one."""
        path = newest(self.folder)[0]
        return None if path is None else step_of(path)

    def method_begun(self) -> str | None:
        """The method of the run, finished or not, as its folder or its newest whole checkpoint has it; None of none."""
        if (self._run / RUN).is_file():
            settings = read_run(self._run)[0]["settings"]
        else:
            path = newest(self.folder)[0]
            settings = {} if path is None else read_manifest(path).extra.get("settings", {})
        method = settings.get("method") if isinstance(settings, dict) else None
        return method if isinstance(method, str) else None

    def refuse_to_overwrite(self) -> None:
        """Raise UsageError if there is a checkpoint: starting the run again would lose it."""
        step = self.last()
        if step is not None:
            raise UsageError(
                f"{self.folder} holds a checkpoint of step {step} of a run to {self._run} that has not ended: give "
                "--resume to go on from it, or delete that folder to start again"
            )

    def find(self, *, required: bool) -> tuple[int, str]:
        """The step of the newest checkpoint that is whole, 0 without one, and a sentence on what is there.

        Raises UsageError for one of a run with other settings; if it is `required`, also where there is none.
        """
        path, complaints = self._newest()
        if path is not None:
            return step_of(path), f"{self._run}: goes on from the checkpoint of step {step_of(path)}"
        whole = f" that is whole ({'; '.join(complaints)})" if complaints else ""
        none = f"{self.folder} holds no checkpoint{whole}"
        if required:
            raise UsageError(
                f"nothing to resume: {none} of the run to {self._run}. Leave --resume out to begin, give --auto-resume "
                "to begin where there is nothing, or name the --out of the run that was interrupted"
            )
        return 0, f"{self._run}: begins, for {none}"

    def clear(self) -> None:
        """Remove all checkpoints of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))
