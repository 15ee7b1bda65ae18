"""What a plan is to be best in: time, money, memory, or the time to a loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stretto.errors import UsageError, nearest
from stretto.plan.clock import CLOCKS, Clock
from stretto.plan.space import Candidate

Goal = Literal["step", "money", "memory", "loss"]
GOALS: tuple[Goal, ...] = ("step", "money", "memory", "loss")


class Penalty(NamedTuple):
    """How many times as many steps a method takes to a loss as backprop does, and where that is from."""

    factor: float
    source: Literal["law", "given", "measured", "assumed"]


PER_UPDATE, LOCAL = (
    0.02,
    0.5,
)  # assumed: 2 % more steps for each update of mean delay, half as many again for own losses


def assumed(clock: Clock, candidate: Candidate) -> Penalty:
    """Where nobody has measured: a guess that grows with delay; synchronous methods are plain training, exactly."""
    if clock.drains or candidate.stages == 1:
        return Penalty(1.0, "law")
    delay = sum(clock.delay(candidate.at(s)) for s in range(candidate.stages)) / candidate.stages
    return Penalty(1 + PER_UPDATE * delay + LOCAL * (clock.family == "local"), "assumed")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What counts. Steps to the loss: S_min (1 + B_crit / B) x penalty (McCandlish et al. 2018).

    `critical_batch` is the batch size at which both time and examples are twice what they need be, `least_steps` the
    steps of an infinite batch. `penalties` are by method, given or measured; others are assumed.
    """

    goal: Goal = "step"
    critical_batch: float | None = None
    least_steps: float = 1.0
    penalties: Mapping[str, Penalty] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UsageError(f"unknown objective {self.goal!r}: {nearest(self.goal, GOALS)}")
        if self.goal == "loss" and self.critical_batch is None:
            raise UsageError(
                "the time to a loss needs the critical batch size: give critical_batch, which stretto train --measure "
                "noise estimates"
            )
        for name, value in (("critical_batch", self.critical_batch), ("least_steps", self.least_steps)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name}={value:g}: choose a positive number")
        for method, penalty in self.penalties.items():
            if method not in CLOCKS:
                raise UsageError(f"a penalty for the unknown method {method!r}: {nearest(method, CLOCKS)}")
            if not 0 < penalty.factor < float("inf"):
                raise UsageError(f"penalty {method}={penalty.factor:g}: choose a positive number, 1 for none")

    def penalty(self, candidate: Candidate) -> Penalty:
        """Of a candidate's method; with a single stage every method is plain training."""
        if candidate.stages == 1:
            return Penalty(1.0, "law")
        return self.penalties.get(candidate.method) or assumed(candidate.clock, candidate)

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
