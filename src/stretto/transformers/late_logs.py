"""Logs of asynchronous methods, whose losses are known `lag` steps later: each under the step that it belongs to.

    step          0    1    2    3    4    5         lag 2, logging_steps=2
    loss of       -    -    0    1    2    3
    logged                       step 2    step 4

An entry waits until the last loss of its steps is known.
"""

import math
from collections import deque
from dataclasses import dataclass, field


@dataclass
class LateLog:
    """What is logged of the steps from `first` up to `step`, once their losses are known."""

    first: int
    step: int
    epoch: float | None
    values: dict[str, float]


@dataclass
class LateLogs:
    """The losses so far, by step, and the entries that wait for theirs; `first` is the first step without an entry."""

    first: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    waiting: deque[LateLog] = field(default_factory=deque)
    total: float = 0.0  # of all losses that have been logged

    def know(self, step: int, loss: float) -> None:
        """The loss of a step, counted from 0; those that were logged already are left alone."""
        if step >= self.first or any(entry.first <= step < entry.step for entry in self.waiting):
            self.losses[step] = loss

    def wait(self, step: int, epoch: float | None, values: dict[str, float]) -> None:
        """Log the steps up to `step` once their losses are known."""
        self.waiting.append(LateLog(self.first, step, epoch, values))
        self.first = step

    def ready(self) -> list[LateLog]:
        """The entries whose losses are all known, with their mean as `loss`."""
        done = []
        while self.waiting and all(n in self.losses for n in range(self.waiting[0].first, self.waiting[0].step)):
            entry = self.waiting.popleft()
            losses = [self.losses.pop(n) for n in range(entry.first, entry.step)]
            self.total += sum(losses)
            done.append(LateLog(entry.first, entry.step, entry.epoch, {"loss": mean(losses), **entry.values}))
        return done

    def rest(self) -> float:
        return sum(self.losses.values())


def mean(losses: list[float]) -> float:
    """The mean; of the numbers among them, if there are any (transformers' logging_nan_inf_filter)."""
    finite = [loss for loss in losses if math.isfinite(loss)] or losses
    return sum(finite) / len(finite)
