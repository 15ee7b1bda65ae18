"""Measured times of all-reduces beside the times that the formulas predict."""

from dataclasses import asdict, dataclass
from typing import Any

from stretto.collectives.algorithms import ALGORITHMS, NESTED, plans
from stretto.collectives.calibration import ITEM, Calibration, predicted
from stretto.collectives.pricing import traffic


@dataclass(frozen=True)
class ComparedTime:
    """One algorithm at one size. Of torch's own all-reduce only the time is known."""

    bytes: int
    algorithm: str
    seconds: float
    fastest: bool = False
    messages: int | None = None  # of the process that sends the most bytes
    sent: int | None = None  # bytes that this process sends
    predicted: float | None = None  # seconds

    @property
    def ratio(self) -> float | None:
        """Measured seconds over predicted ones; None without a prediction."""
        return self.seconds / self.predicted if self.predicted else None

    def to_json(self) -> dict[str, Any]:
        """The fields and the ratio, as JSON takes them."""
        return asdict(self) | {"ratio": self.ratio}


def compared(calibration: Calibration) -> list[ComparedTime]:
    """A row for each size and algorithm, in the order they were measured."""
    return [
        row_of(calibration, times.bytes, name, seconds, times.fastest == name)
        for times in calibration.measured
        for name, seconds in times.seconds.items()
    ]


def row_of(calibration: Calibration, num_bytes: int, name: str, seconds: float, fastest: bool) -> ComparedTime:
    """The comparison of one algorithm at one size."""
    if name not in ALGORITHMS:
        return ComparedTime(num_bytes, name, seconds)
    per_node = calibration.per_node if name == NESTED else None
    traffics = [traffic(plan) for plan in plans(name, calibration.workers, num_bytes // ITEM, per_node=per_node)]
    busiest = max(traffics, key=lambda process: (process.elements, process.messages))
    time = predicted(name, calibration.link, calibration.workers, num_bytes, per_node)
    return ComparedTime(num_bytes, name, seconds, fastest, busiest.messages, busiest.elements * ITEM, time)
