"""One cut-off: which runs reach it, at what cost, and which methods never do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.report import units
from stretto.report.cutoffs import choose
from stretto.report.metric import Metric
from stretto.report.record import Point, Record, methods

Cost = tuple[float, float]  # (serial FLOP, total FLOP)


@dataclass(frozen=True)
class Arrival:
    """A run at its first evaluation that is as good as the cut-off."""

    record: Record
    point: Point
    dominated: bool  # by another run of the same method

    def to_json(self) -> dict[str, Any]:
        """The run, and its step, its compute in FLOP and its seconds at this evaluation."""
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

    @property
    def goal(self) -> str:
        """The cut-off as a reader sees it, e.g. `train loss ≤ 0.1`."""
        sign = "≥" if self.metric.higher else "≤"
        return f"{self.metric.label} {sign} {units.cutoff(self.cutoff, self.metric.is_share)}"

    def fastest(self, method: str) -> Arrival | None:
        """Find the method's arrival with the least serial compute; of equals the one with the least total compute."""
        return min(self._of(method), key=lambda arrival: cost(arrival.point), default=None)

    def soonest(self, method: str) -> Arrival | None:
        """Find the method's arrival with the least time by the clock."""
        return min(self._of(method), key=lambda arrival: arrival.point.seconds, default=None)

    def _of(self, method: str) -> list[Arrival]:
        return [arrival for arrival in self.arrivals if arrival.record.method == method]

    def to_json(self) -> dict[str, Any]:
        """The frontier of every method: arrivals that no other run of the method dominates."""
        return {
            "metric": self.metric.name,
            "cutoff": self.cutoff,
            "points": [arrival.to_json() for arrival in self.arrivals if not arrival.dominated],
            "missing": list(self.missing),
        }


def panel(records: Sequence[Record], metric: Metric, cutoff: float) -> Panel:
    """Find the runs that reach the cut-off. Every run counts, each seed by itself, as in Laskin, Metz et al. 2020."""
    arrivals: list[Arrival] = []
    missing: list[str] = []
    for method in methods(tuple(records)):
        runs = [record for record in records if record.method == method]
        reached = [(record, point) for record in runs if (point := first_reaching(record, metric, cutoff)) is not None]
        flags = dominated([cost(point) for _, point in reached])
        arrivals += [Arrival(record, point, flag) for (record, point), flag in zip(reached, flags, strict=True)]
        if not reached:
            missing.append(method)
    return Panel(metric, cutoff, tuple(arrivals), tuple(missing))


def first_reaching(record: Record, metric: Metric, cutoff: float) -> Point | None:
    """Find the first evaluation at which the run is as good as the cut-off, or None if it never is.

    A run that diverges later has reached the cut-off all the same.
    """
    for point in record.points:
        value = metric.at(point)
        if value is not None and metric.reaches(value, cutoff):
            return point
    return None


def cost(point: Point) -> Cost:
    """(serial compute, total compute) in FLOP: the two costs that a frontier trades, time against expense."""
    return point.serial_flops, point.total_flops


def dominated(costs: Sequence[Cost]) -> tuple[bool, ...]:
    """For each cost, whether another is no worse in both parts and better in one; equal costs are both kept."""
    order = sorted(range(len(costs)), key=lambda index: costs[index])
    flags = [False] * len(costs)
    best: Cost | None = None  # the last non-dominated cost: the lowest total so far
    for index in order:
        if best is not None and costs[index][1] >= best[1] and costs[index] != best:
            flags[index] = True
        else:
            best = costs[index]
    return tuple(flags)


def panels(records: Sequence[Record], metric: Metric) -> tuple[Panel, ...]:
    """One panel for each cut-off that suits these runs, from easy to hard."""
    return tuple(panel(records, metric, cutoff) for cutoff in choose(records, metric))
