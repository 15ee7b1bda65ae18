"""What a plan is to be best in: time, money, memory, or the time to a loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stretto.errors import UsageError, nearest
from stretto.options.checks import is_among, shown
from stretto.plan.planned_methods import catalogue, planned
from stretto.plan.search_space import Candidate

Goal = Literal["step", "money", "memory", "loss"]
GOALS: tuple[Goal, ...] = ("step", "money", "memory", "loss")


class Penalty(NamedTuple):
    """How many times as many steps a method takes to a loss as backprop does, and where that is from.

    A measured one has a standard `error` over seeds (None with a single seed) and what it was measured at: the number
    of `losses` that train the model and the mean `delay` over stages, in updates. "extrapolated": measured at others.
    """

    factor: float
    source: Literal["law", "given", "measured", "extrapolated", "assumed"]
    error: float | None = None
    losses: int = 0
    delay: float = 0.0

    def at(self, candidate: Candidate) -> "Penalty":
        """For a candidate: what it takes longer grows with the delay; for losses of other parts nothing is known."""
        delay = mean_delay(candidate)
        if self.source != "measured" or (num_losses(candidate), delay) == (self.losses, self.delay):
            return self
        more = self.factor - 1
        times = delay / self.delay if self.delay and more > 0 else 1.0
        error = None if self.error is None else times * self.error
        return self._replace(factor=1 + times * more, source="extrapolated", error=error)


PER_UPDATE, LOCAL = (
    0.02,
    0.5,
)  # assumed: 2 % more steps for each update of mean delay, half as many again for own losses


def mean_delay(candidate: Candidate) -> float:
    """How old gradients are, mean over stages."""
    return sum(candidate.planning.delay(candidate.at(s)) for s in range(candidate.stages)) / candidate.stages


def num_losses(candidate: Candidate) -> int:
    """How many losses train the model."""
    return 1 + len(candidate.gradients.heads)


def assumed(candidate: Candidate) -> Penalty:
    """Where nobody has measured: a guess that grows with delay; synchronous methods are plain training, exactly."""
    if candidate.planned.drains or candidate.stages == 1:
        return Penalty(1.0, "law")
    return Penalty(1 + PER_UPDATE * mean_delay(candidate) + LOCAL * (candidate.planned.family == "local"), "assumed")


def check_known(method: str) -> None:
    """Refuse a penalty of a method that no plan can have."""
    try:
        planned(method)
    except UsageError as error:
        raise UsageError(f"a penalty for the unknown method {method!r}: {nearest(method, catalogue())}") from error


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What counts. Steps to the loss: S_min (1 + B_crit / B) x penalty (McCandlish et al. 2018).

    `critical_batch` is the batch size at which both time and examples are twice what they need be, `least_steps` the
    steps of an infinite batch. `penalties` are by method, given; then `measured` ones, of which the one at the nearest
    delay counts; others are assumed.
    """

    goal: Goal = "step"
    critical_batch: float | None = None
    least_steps: float = 1.0
    penalties: Mapping[str, Penalty] = field(default_factory=dict)
    measured: Mapping[str, tuple[Penalty, ...]] = field(default_factory=dict)

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
        """Of a candidate's method; with a single stage every method is plain training."""
        if candidate.stages == 1:
            return Penalty(1.0, "law")
        given, measured = self.penalties.get(candidate.method), self.measured.get(candidate.method, ())
        if given is not None or not measured:
            return given or assumed(candidate)
        losses, delay = num_losses(candidate), mean_delay(candidate)
        return min(measured, key=lambda each: (abs(each.losses - losses), abs(each.delay - delay))).at(candidate)

    def steps(self, candidate: Candidate) -> float:
        """Steps to the loss."""
        critical = self.critical_batch or 0.0
        return self.least_steps * (1 + critical / candidate.batch) * self.penalty(candidate).factor

    def factor(self, candidate: Candidate, price: float | None) -> float:
        """What a candidate's seconds are multiplied by: per example; in money; in steps. `price` is money an hour."""
        if self.goal == "money":
            if price is None:
                raise UsageError("money: the price of a device is not known; add price_per_hour to the cluster's file")
            return price / 3600 / candidate.batch
        return self.steps(candidate) if self.goal == "loss" else 1 / candidate.batch
