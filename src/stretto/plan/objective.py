"""The objective of a plan: least time a step, money, energy, memory, or time to a loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stretto.errors import UsageError, nearest
from stretto.options.checks import is_among, shown
from stretto.plan.places import Bill, Places
from stretto.plan.planned_methods import catalogue, planned
from stretto.plan.search_space import Candidate

Goal = Literal["step", "money", "energy", "memory", "loss"]
GOALS: tuple[Goal, ...] = ("step", "money", "energy", "memory", "loss")


Source = Literal["law", "given", "measured", "ours", "extrapolated from measured", "extrapolated from ours", "assumed"]
EXTRAPOLATED: Mapping[Source, Source] = {"measured": "extrapolated from measured", "ours": "extrapolated from ours"}


class Penalty(NamedTuple):
    """The steps that a method takes to a loss, over those of backprop, and the source of that factor.

    A "measured" penalty, or one of "ours" (of this package's own studies), has a standard `error` over seeds (None for
    a single seed), the number of `losses` that trained the model, and the mean `delay` over stages, in updates. One
    that is extrapolated is from such a penalty at other values. `bound` is "at least" where a seed never came to the
    loss: the factor is larger than this. `found` is the factor that a study found, where another one counts instead.
    """

    factor: float
    source: Source
    error: float | None = None
    losses: int = 0
    delay: float = 0.0
    bound: Literal["", "at least"] = ""
    found: float | None = None

    @property
    def remarks(self) -> dict[str, float | str]:
        """What there is to say of the factor, by name: its error, that it is a bound, what was found instead."""
        remarks = {"error": self.error, "bound": self.bound or None, "found": self.found}
        return {name: value for name, value in remarks.items() if value is not None}

    def at(self, candidate: Candidate) -> "Penalty":
        """This penalty at the candidate's delay: its excess over 1 scales with it, not with the number of losses.

        A lower bound grows with delay and never shrinks, since a smaller number would bound nothing; where the
        assumption of a method not measured is larger than that, it counts.
        """
        if self.source not in EXTRAPOLATED:
            return self
        here = (num_losses(candidate), mean_delay(candidate)) == (self.losses, self.delay)
        there = self if here else self._at_delay(mean_delay(candidate))
        guess = assumed(candidate)
        return guess if there.bound and guess.factor > there.factor else there

    def _at_delay(self, delay: float) -> "Penalty":
        excess = self.factor - 1
        ratio = delay / self.delay if self.delay and excess > 0 else 1.0
        ratio = max(1.0, ratio) if self.bound else ratio
        error = None if self.error is None else ratio * self.error
        return self._replace(factor=1 + ratio * excess, source=EXTRAPOLATED[self.source], error=error)


class Rates(NamedTuple):
    """How the value of a goal follows from seconds: `step` for each second of a step.

    And `busy[w]` for each second that worker w of the pipeline is busy in it; empty where only the step counts.
    """

    step: float
    busy: tuple[float, ...] = ()


PER_UPDATE = 0.02  # assumed: 2 % more steps for each update of mean delay
LOCAL = 0.5  # assumed: half as many steps again for stages with losses of their own


def mean_delay(candidate: Candidate) -> float:
    """The delay of gradients in updates, mean over stages."""
    return sum(candidate.planning.delay(candidate.stage_at(s)) for s in range(candidate.stages)) / candidate.stages


def num_losses(candidate: Candidate) -> int:
    """The number of losses that train the model."""
    return 1 + len(candidate.gradients.heads)


def assumed(candidate: Candidate) -> Penalty:
    """The penalty of a method not measured: a guess that grows with delay; exactly 1 for synchronous methods."""
    if candidate.planned.drains or candidate.stages == 1:
        return Penalty(1.0, "law")
    return Penalty(1 + PER_UPDATE * mean_delay(candidate) + LOCAL * (candidate.planned.family == "local"), "assumed")


def check_known(method: str) -> None:
    """Raise UsageError for a penalty of a method that plans do not know."""
    try:
        planned(method)
    except UsageError as error:
        raise UsageError(f"a penalty for the unknown method {method!r}: {nearest(method, catalogue())}") from error


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The quantity that a plan minimises. Steps to a loss: S_min (1 + B_crit / B) x penalty (McCandlish et al. 2018).

    `critical_batch` (B_crit) is the batch size that takes twice the least steps and twice the least examples;
    `least_steps` (S_min) are the steps of an infinite batch. A method's penalty is taken from `penalties`, else from
    `measured`, a study or what this package's own studies found, at the nearest number of losses and delay, else
    assumed: `best_of_delay` are (mean delay in updates, the least factor found at it), and no stale gradients are
    assumed to do better. Raises UsageError for values out of range.
    """

    goal: Goal = "step"
    critical_batch: float | None = None
    least_steps: float = 1.0
    penalties: Mapping[str, Penalty] = field(default_factory=dict)
    measured: Mapping[str, tuple[Penalty, ...]] = field(default_factory=dict)
    best_of_delay: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not is_among(self.goal, GOALS):
            raise UsageError(f"unknown objective {shown(self.goal)}: {nearest(str(self.goal), GOALS)}")
        if self.goal == "loss" and self.critical_batch is None:
            raise UsageError(
                "the time to a loss needs the critical batch size: give critical_batch, which stretto train --measure "
                "noise estimates, or measured, a study of several batch sizes"
            )
        for name, value in (("critical_batch", self.critical_batch), ("least_steps", self.least_steps)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name}={value:g}: choose a positive number")
        for method, penalty in self.penalties.items():
            check_known(method)
            if not 0 < penalty.factor < float("inf"):
                raise UsageError(f"penalty {method}={penalty.factor:g}: choose a positive number, 1 for none")

    def penalty(self, candidate: Candidate) -> Penalty:
        """The penalty of a candidate's method; 1 for a single stage, where every method is plain training.

        Of several measured ones the nearest in losses and delay counts, of two as near the larger one.
        """
        if candidate.stages == 1:
            return Penalty(1.0, "law")
        given, measured = self.penalties.get(candidate.method), self.measured.get(candidate.method, ())
        if given is not None or not measured:
            return given or self.assumed(candidate)
        losses, delay = num_losses(candidate), mean_delay(candidate)

        def distance(known: Penalty) -> tuple[float, float, float]:
            return abs(known.losses - losses), abs(known.delay - delay), -known.factor

        return min(measured, key=distance).at(candidate)

    def assumed(self, candidate: Candidate) -> Penalty:
        """The penalty of a method not measured: no less than of the best method tried at its delay or a smaller one.

        Of a method tried at a larger delay counts the share of what it took beyond 1.
        """
        guess = assumed(candidate)
        if candidate.planned.drains:
            return guess
        delay = mean_delay(candidate)
        best = [1 + (factor - 1) * min(1.0, delay / tried) for tried, factor in self.best_of_delay]
        return guess._replace(factor=max([guess.factor, *best]))

    def steps(self, candidate: Candidate) -> float:
        """Steps to the loss that a candidate takes."""
        critical = self.critical_batch or 0.0
        return self.least_steps * (1 + critical / candidate.batch) * self.penalty(candidate).factor

    def rates(self, candidate: Candidate, places: Places | Bill) -> Rates:
        """The factors from seconds to the objective's value: of the time to a loss, else of an example.

        Raises UsageError where the price or the power of a device is not known.
        """
        batch, price, power = candidate.batch, places.price, places.power
        if self.goal == "money":
            if price is None:
                raise UsageError("money: the price of a device is not known; add price_per_hour to the cluster's file")
            return Rates(price / 3600 / batch)
        if self.goal == "energy":
            if power is None:
                raise UsageError("energy: the power of a device is not known; add watts to the cluster's file")
            return Rates(power.waiting / batch, tuple(more / batch for more in power.more) if any(power.more) else ())
        if self.goal == "memory":
            return Rates(0.0)
        return Rates(self.steps(candidate) if self.goal == "loss" else 1 / batch)
