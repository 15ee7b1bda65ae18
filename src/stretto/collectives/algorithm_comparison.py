"""Measured times beside those that the formulas give."""

from dataclasses import asdict, dataclass
from typing import Any

from stretto.collectives.algorithms import ALGORITHMS, NESTED, plans
from stretto.collectives.calibration import ITEM, Calibration, predicted
from stretto.collectives.pricing import traffic


@dataclass(frozen=True)
class ComparedTime:
    """One algorithm at one size. Of torch's own nothing but the time is known."""

    bytes: int
    algorithm: str
    seconds: float
    fastest: bool = False
    messages: int | None = None  # of the process that sends most
    sent: int | None = None  # bytes, of the same
    predicted: float | None = None  # seconds

    @property
    def ratio(self) -> float | None:
        """Measured seconds over predicted ones; None without a prediction."""
        return self.seconds / self.predicted if self.predicted else None

    def to_json(self) -> dict[str, Any]:
        """As it is printed."""
        return asdict(self) | {"ratio": self.ratio}


def compared(calibration: Calibration) -> list[ComparedTime]:
    """A row for each size and algorithm, in the order they were measured."""
    return [
        row_of(calibration, each.bytes, name, seconds, each.fastest == name)
        for each in calibration.measured
        for name, seconds in each.seconds.items()
    ]


def row_of(calibration: Calibration, num_bytes: int, name: str, seconds: float, fastest: bool) -> ComparedTime:
    """The comparison of one algorithm at one size."""
    if name not in ALGORITHMS:
        return ComparedTime(num_bytes, name, seconds)
    node = calibration.per_node if name == NESTED else None
    sent = [traffic(plan) for plan in plans(name, calibration.workers, num_bytes // ITEM, per_node=node)]
    most = max(sent, key=lambda each: (each.elements, each.messages))
    time = predicted(name, calibration.link, calibration.workers, num_bytes, node)
    return ComparedTime(num_bytes, name, seconds, fastest, most.messages, most.elements * ITEM, time)
