"""Cut-offs of a metric, and for each: the runs that reach it, their cost, and the methods that never do.

Let position 0 be the median first evaluation of all runs and position 1 the best value of any run, on a logarithmic
scale: of the loss, of the error (1 - accuracy), of 100 - BLEU. Of a user's metric of which more is better nobody knows
the largest value: its scale is linear. Let q be the position that nearly all methods (at least
four in five) reach, kept between 0.3 and 0.7. The cut-offs lie at

    q/2         halfway to what nearly all reach: where fast and rough methods shine
    q           what nearly all reach
    (q+1)/2     where some drop out
    1           what only the best reach

and are rounded to the roundest number nearby; the second and the last towards the easier side only, so that they are
still reached.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stretto.report import units
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


NEARLY_ALL = 0.8
SMALLEST_LOSS = 1e-6  # below this a float32 mean loss is noise
SMALLEST_ERROR = 1e-3  # where no run has any error left


def choose(records: Sequence[Record], metric: Metric) -> tuple[float, ...]:
    """Up to four cut-offs from easy to hard; none if no run improves on the first evaluation."""
    histories = {record.id: _badness(record, metric) for record in records}
    started = [history[0] for history in histories.values() if history]
    if not started:
        return ()
    bests = sorted(
        min(min(histories[record.id]) for record in records if record.method == method and histories[record.id])
        for method in methods(tuple(records))
        if any(histories[record.id] for record in records if record.method == method)
    )
    bounded = metric.higher and metric.whole is not None
    scale = _Scale(start=median(started), bests=tuple(bests), errors=bounded)
    chosen = scale.cutoffs() if scale.progress > 0.01 else ()
    return tuple(_value(badness, metric) for badness in chosen)


def _value(badness: float, metric: Metric) -> float:
    """The value that `_badness` made a number of which less is better."""
    if not metric.higher:
        return badness
    return -badness if metric.whole is None else float(f"{metric.whole * (1 - badness):.12g}")


def roundest(low: float, high: float, target: float) -> float:
    """The roundest number in [low, high]: of the coarsest grid (1, 2, 5 times a power of ten) the nearest to `target`.

    >>> roundest(0.043, 0.058, 0.05)
    0.05
    >>> roundest(3.76, 3.88, 3.8)
    3.8
    """
    exponent = math.floor(math.log10(max(abs(low), abs(high)))) + 1
    for power in range(exponent, exponent - 16, -1):
        for digit in (5, 2, 1):
            step = digit * 10.0**power
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if first <= last:
                return float(f"{min(max(round(target / step), first), last) * step:.12g}")
    return target


def _badness(record: Record, metric: Metric) -> list[float]:
    """The metric at each evaluation, lower being better: a loss as it is, 1 - accuracy, 1 - BLEU / 100, -f1."""
    values = [value for point in record.points if (value := metric.at(point)) is not None]
    if not metric.higher:
        return values
    whole = metric.whole
    return [-value if whole is None else round(1 - value / whole, 12) for value in values]


class _Scale:
    """Positions of values: 0 at the start, 1 at the best value; logarithmic unless losses are negative."""

    def __init__(self, start: float, bests: tuple[float, ...], errors: bool) -> None:
        positive = [best for best in bests if best > 0]
        floor = min(positive, default=SMALLEST_ERROR) / 2 if errors else SMALLEST_LOSS
        self.linear = bests[0] < 0
        self.bests = bests if self.linear or errors else tuple(max(best, floor) for best in bests)
        self.floor = floor
        self.start = self._transformed(start)
        self.end = self._transformed(self.bests[0])
        self.length = self.start - self.end
        spread = max(abs(self.start), abs(self.end)) or 1.0
        self.progress = self.length / spread if self.linear else self.length  # a share; a logarithm is one already

    def cutoffs(self) -> tuple[float, ...]:
        nearly_all = self.bests[math.ceil(NEARLY_ALL * len(self.bests)) - 1]
        q = min(max((self.start - self._transformed(nearly_all)) / self.length, 0.3), 0.7)
        return (
            self._round(q / 2, easier=q / 8, harder=q / 8),
            self._round(q, easier=q / 8, harder=0),
            self._round((q + 1) / 2, easier=(1 - q) / 8, harder=(1 - q) / 8),
            self._tightest(easier=(1 - q) / 8),
        )

    def _transformed(self, value: float) -> float:
        return value if self.linear else math.log(max(value, self.floor))

    def _value(self, position: float) -> float:
        scaled = self.start - position * self.length
        return scaled if self.linear else math.exp(scaled)

    def _round(self, position: float, easier: float, harder: float) -> float:
        return roundest(self._value(position + harder), self._value(position - easier), self._value(position))

    def _tightest(self, easier: float) -> float:
        """A value that the best method reaches, and the second best does not unless it is within 2 % of the best."""
        best, high = self.bests[0], self._value(1 - easier)
        others = [value for value in self.bests if value > best]
        if others:
            high = min(high, max(others[0] - 1e-9 * abs(others[0]), best + 0.02 * abs(best)))
        return roundest(best, max(high, best), best)
