"""One cut-off: which runs reach it, at what cost, and which methods never do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.report.cutoffs import choose
from stretto.report.frontier import cost, dominated, first_reaching
from stretto.report.metric import Metric
from stretto.report.record import Point, Record, methods


@dataclass(frozen=True)
class Arrival:
    """A run at the first evaluation where it is as good as the cut-off."""

    record: Record
    point: Point
    dominated: bool  # by another run of the same method

    def to_json(self) -> dict[str, Any]:
        """Plain data: which run, when, at what cost in FLOP, after how many seconds."""
        return {
            "run": self.record.id,
            "method": self.record.method,
            "seed": self.record.seed,
            "options": dict(self.record.options),
            "step": self.point.step,
            "serial_flops": self.point.serial_flops,
            "total_flops": self.point.total_flops,
            "seconds": self.point.seconds,
            "dominated": self.dominated,
        }


@dataclass(frozen=True)
class Panel:
    """All arrivals at one cut-off of one metric."""

    metric: Metric
    cutoff: float
    arrivals: tuple[Arrival, ...]
    missing: tuple[str, ...]  # methods of which no run reaches the cut-off

    def fastest(self, method: str) -> Arrival | None:
        """Find the method's arrival with the least serial compute; of equals the one with the least total compute."""
        own = [arrival for arrival in self.arrivals if arrival.record.method == method]
        return min(own, key=lambda arrival: cost(arrival.point), default=None)

    def soonest(self, method: str) -> Arrival | None:
        """Find the method's arrival with the least time by the clock."""
        own = [arrival for arrival in self.arrivals if arrival.record.method == method]
        return min(own, key=lambda arrival: arrival.point.seconds, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the frontier of every method, dominated runs left out."""
        return {
            "metric": self.metric.name,
            "cutoff": self.cutoff,
            "points": [arrival.to_json() for arrival in self.arrivals if not arrival.dominated],
            "missing": list(self.missing),
        }


def panel(records: Sequence[Record], metric: Metric, cutoff: float) -> Panel:
    """Find who reaches the cut-off. Every run counts, each seed by itself, as in Laskin, Metz et al. 2020."""
    arrivals: list[Arrival] = []
    missing: list[str] = []
    for method in methods(tuple(records)):
        own = [record for record in records if record.method == method]
        reached = [(record, point) for record in own if (point := first_reaching(record, metric, cutoff)) is not None]
        flags = dominated([cost(point) for _, point in reached])
        arrivals += [Arrival(record, point, flag) for (record, point), flag in zip(reached, flags, strict=True)]
        if not reached:
            missing.append(method)
    return Panel(metric, cutoff, tuple(arrivals), tuple(missing))


def panels(records: Sequence[Record], metric: Metric) -> tuple[Panel, ...]:
    """One panel for each cut-off that suits these runs, from easy to hard."""
    return tuple(panel(records, metric, cutoff) for cutoff in choose(records, metric))
