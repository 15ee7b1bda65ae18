"""Arrivals, intervals over seeds, and verdicts: pure functions of curves."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from scipy import stats

Point = tuple[float, float]
"""A step, and the loss there."""


class Interval(NamedTuple):
    """A mean and the ends of its 95 % interval; `high` is infinite where some seed never arrived."""

    mean: float
    low: float
    high: float

    @property
    def is_one_value(self) -> bool:
        """Whether all runs have the same value, as they may of a quantised measure: there is no spread to tell."""
        return math.isclose(self.low, self.high, rel_tol=1e-9, abs_tol=1e-9)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"> {self.low:.2f}"
        if self.is_one_value:
            return f"{self.mean:.3g} in every run"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def arrival(curve: Sequence[Point], cutoff: float) -> float | None:
    """The first step at which the line through two neighbouring evaluations comes down to the cut-off; None if never.

    A curve that begins at or below the cut-off arrives at its first evaluation.
    """
    before: Point | None = None
    for step, loss in curve:
        if loss <= cutoff:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - cutoff) / (before[1] - loss)
        before = (step, loss) if math.isfinite(loss) else None
    return None


def value_at(curve: Sequence[Point], step: float) -> float:
    """The loss at a step, on the line through its neighbouring evaluations. Raises ValueError outside of the curve."""
    for (left, one), (right, other) in itertools.pairwise(curve):
        if left <= step <= right:
            return one + (other - one) * (step - left) / (right - left)
    raise ValueError(f"step {step:g} is not between the evaluations at {curve[0][0]:g} and {curve[-1][0]:g}")


def quantile(number: int) -> float:
    """The 97.5 % quantile of Student's distribution for so many values, with the three decimals of the rules."""
    return round(float(stats.t.ppf(0.975, number - 1)), 3)


def interval(values: Sequence[float]) -> Interval:
    """The mean of two or more values with its two-sided 95 % Student interval."""
    mean = statistics.fmean(values)
    half = quantile(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def geometric(values: Sequence[float]) -> Interval:
    """The geometric mean of two or more positive values, with the interval of its logarithm."""
    return Interval(*map(math.exp, interval([math.log(value) for value in values])))


def geometric_error(found: Interval, seeds: int = 3) -> float:
    """The standard error of a geometric mean whose interval this is."""
    return found.mean * math.log(found.high / found.low) / (2 * quantile(seeds))


def product(one: Interval, other: Interval) -> Interval:
    """The product of two means that vary independently: half widths of logarithms add up as their squares do.

    Where one has no upper end, neither has the product, which begins at the product of the lower ends.
    """
    if math.isinf(one.high) or math.isinf(other.high):
        return Interval(math.inf, one.low * other.low, math.inf)
    half = math.hypot(*(math.log(each.high / each.low) / 2 for each in (one, other)))
    mean = one.mean * other.mean
    return Interval(mean, mean * math.exp(-half), mean * math.exp(half))


def ratio(
    arrivals: Mapping[int, float | None], reference: Mapping[int, float | None], ends: Mapping[int, float]
) -> Interval | None:
    """Arrivals over those of the reference, seed by seed: the geometric mean and the interval of its logarithm.

    `ends` are the last steps of the curves, which stand for an arrival that is missing: the interval then begins at the
    smallest ratio and has no upper end. None where a seed of the reference never arrives, where one arrives at step 0,
    so that there is nothing to compare, or with one seed alone.
    """
    seeds = sorted(set(arrivals) & set(reference))
    pairs = [(arrivals[seed], reference[seed], ends[seed]) for seed in seeds]
    if len(pairs) < 2 or any(not other or mine == 0 for mine, other, _ in pairs):
        return None
    ratios = [(end if mine is None else mine) / other for mine, other, end in pairs if other]
    if any(mine is None for mine, _, _ in pairs):
        return Interval(math.inf, min(ratios), math.inf)
    return geometric(ratios)


def compared(one: Interval | None, other: Interval | None) -> Literal["less", "more", "undecided"]:
    """How one interval lies to the other: "undecided" where they have a point in common, or one is not known."""
    if one is None or other is None:
        return "undecided"
    if one.high < other.low:
        return "less"
    return "more" if one.low > other.high else "undecided"


def against(
    one: Interval | None, other: Interval | float | None, words: tuple[str, str], *, unknown: str = "open"
) -> str:
    """The first word where one lies below the other, the second where it lies above; else "undecided".

    `unknown` while one of them is not known.
    """
    if one is None or other is None:
        return unknown
    other = other if isinstance(other, Interval) else Interval(other, other, other)
    return {"less": words[0], "more": words[1], "undecided": "undecided"}[compared(one, other)]


def bounded(found: Interval | None, bound: float) -> Literal["reached", "missed", "undecided"]:
    """Whether a value is at most `bound`: reached if the whole interval is, missed if no point of it is."""
    if found is None:
        return "undecided"
    if found.high <= bound:
        return "reached"
    return "missed" if found.low > bound else "undecided"
