"""One cut-off: which runs reach it, at what cost, and which methods never do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.report import units
from stretto.report.cutoffs import choose
from stretto.report.metric import Metric
from stretto.report.record import Point, Record, methods

Cost = tuple[float, float]  # (serial FLOP, total FLOP)
COSTS = ("step", "examples", "serial_flops", "total_flops", "seconds")  # of a Crossing


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What a run had spent when it crossed a cut-off.

    Between the last evaluation that is not as good as the cut-off and the first one that is, the metric and the costs
    are taken to change linearly with each other: costs grow linearly with the steps, and a run's first evaluation may
    have cost nothing, which a logarithm could not start from. A run that is as good at its first evaluation has
    crossed there.
    """

    evaluation: Point  # the first one that is as good as the cut-off
    step: float
    examples: float
    serial_flops: float
    total_flops: float
    seconds: float

    @property
    def cost(self) -> Cost:
        """(serial compute, total compute) in FLOP: the two costs that a frontier trades, time against expense."""
        return self.serial_flops, self.total_flops


@dataclass(frozen=True)
class Arrival:
    """A run that is as good as the cut-off at some evaluation, and where it crossed it."""

    record: Record
    at: Crossing
    dominated: bool  # by another run of the same method

    @property
    def lost_later(self) -> str:
        """What became of a run that got here and failed all the same, in words; empty if it did not fail."""
        if not self.record.failed:
            return ""
        return "diverged later" if self.record.diverged else "ended no better than it began"

    def to_json(self) -> dict[str, Any]:
        """The run, the step of its evaluation, and its compute in FLOP and its seconds where it crossed."""
        return {
            "run": self.record.id,
            "method": self.record.method,
            "seed": self.record.seed,
            "options": dict(self.record.options),
            "step": self.at.evaluation.step,
            "crossed_at": self.at.step,
            "serial_flops": self.at.serial_flops,
            "total_flops": self.at.total_flops,
            "seconds": self.at.seconds,
            "failed_later": self.record.failed,
            "dominated": self.dominated,
        }


@dataclass(frozen=True)
class Panel:
    """All arrivals at one cut-off of one metric."""

    metric: Metric
    cutoff: float
    arrivals: tuple[Arrival, ...]
    missing: tuple[str, ...]  # methods of which no run reaches the cut-off
    seeds: Mapping[str, frozenset[int]] = field(default_factory=dict)  # with which each method was run

    @property
    def goal(self) -> str:
        """The cut-off as a reader sees it, e.g. `train loss ≤ 0.1`."""
        sign = "≥" if self.metric.higher else "≤"
        return f"{self.metric.label} {sign} {units.cutoff(self.cutoff, self.metric.is_share)}"

    def fastest(self, method: str) -> Arrival | None:
        """Find the method's arrival with the least serial compute; of equals the one with the least total compute."""
        return min(self.of(method), key=lambda arrival: arrival.at.cost, default=None)

    def soonest(self, method: str) -> Arrival | None:
        """Find the method's arrival with the least time by the clock."""
        return min(self.of(method), key=lambda arrival: arrival.at.seconds, default=None)

    def of(self, method: str) -> list[Arrival]:
        """The arrivals of a method."""
        return [arrival for arrival in self.arrivals if arrival.record.method == method]

    def seeds_of(self, method: str) -> frozenset[int]:
        """The seeds with which a method was run, whether it gets here or not."""
        return self.seeds.get(method, frozenset())

    def to_json(self) -> dict[str, Any]:
        """The frontier of every method: arrivals that no other run of the method dominates."""
        return {
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher,
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
        reached = [(record, at) for record in runs if (at := crossing(record, metric, cutoff)) is not None]
        flags = dominated([at.cost for _, at in reached])
        arrivals += [Arrival(record, at, flag) for (record, at), flag in zip(reached, flags, strict=True)]
        if not reached:
            missing.append(method)
    seeds = {method: frozenset(r.seed for r in records if r.method == method) for method in methods(tuple(records))}
    return Panel(metric, cutoff, tuple(arrivals), tuple(missing), seeds)


def first_reaching(record: Record, metric: Metric, cutoff: float) -> Point | None:
    """Find the first evaluation at which the run is as good as the cut-off, or None if it never is.

    A run that diverges later has reached the cut-off all the same.
    """
    for point in record.points:
        value = metric.at(point)
        if value is not None and metric.reaches(value, cutoff):
            return point
    return None


def crossing(record: Record, metric: Metric, cutoff: float) -> Crossing | None:
    """Find where a run crossed the cut-off for the first time; None if no evaluation is as good as that."""
    before: Point | None = None
    for point in record.points:
        value = metric.at(point)
        if value is None:
            continue
        if metric.reaches(value, cutoff):
            return between(before, point, metric, cutoff)
        before = point
    return None


def between(before: Point | None, point: Point, metric: Metric, cutoff: float) -> Crossing:
    """The crossing between an evaluation above the cut-off and the next, which is as good; see `Crossing`."""
    above, below = None if before is None else metric.at(before), metric.at(point)
    if before is None or above is None or below is None or below == cutoff:
        return Crossing(evaluation=point, **{name: float(getattr(point, name)) for name in COSTS})
    share = (above - cutoff) / (above - below)
    costs = {name: (getattr(before, name), getattr(point, name)) for name in COSTS}
    return Crossing(evaluation=point, **{name: low + share * (high - low) for name, (low, high) in costs.items()})


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
