"""The state of a run while it trains, which its checkpoints keep beside the trainer's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from stretto.errors import UsageError
from stretto.measure.energy import EnergyMeter
from stretto.options.kinds import check_values
from stretto.report.record import Measurement, Observation, Point

KINDS: Mapping[str, Any] = {
    "points": list[dict[str, Any]], "observations": list[dict[str, Any]], "measurements": list[dict[str, Any]],
    "step_seconds": list[float], "joules": float | None, "trackers": dict[str, str],
}  # fmt: skip


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
