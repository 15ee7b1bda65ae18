"""What a run knows of itself while it goes on: enough, with a trainer's checkpoint, to go on from there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from stretto.report.record import Measurement, Observation, Point


@dataclass
class Progress:
    """The steps that were made, in seconds each, and what was seen on the way."""

    points: list[Point] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    diverged_at: int | None = None
    final: dict[str, float | None] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return len(self.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain data, of a run that has not ended."""
        return {
            "points": [point.to_json() for point in self.points],
            "observations": [observation.to_json() for observation in self.observations],
            "measurements": [measurement.to_json() for measurement in self.measurements],
            "step_seconds": list(self.step_seconds),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(
            [Point.from_json(each) for each in data["points"]],
            [Observation.from_json(each) for each in data["observations"]],
            [Measurement.from_json(each) for each in data.get("measurements", ())],
            list(data["step_seconds"]),
        )
