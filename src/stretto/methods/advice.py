"""What `method="async"` and `"local"` stand for: the best of this package's own studies, by optimizer and depth.

`findings.json` has what they found (experiments/findings), made by their command and by nothing else.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from stretto.errors import UsageError
from stretto.methods.definition import Method
from stretto.methods.table import is_advised, method
from stretto.options.parse import parse

PLAIN_SGD = "plain-sgd"  # SGD without momentum, or with Nesterov's: it has no velocity that a cure could read
KIN = {"adam": "adamw", "lamb": "adamw", "lars": "sgd", PLAIN_SGD: "sgd"}
"""An optimizer of no study, and the studied one nearest to it."""
UNKNOWN = "adamw"  # stands for any other
ABOUT = 1.25  # times the nearest depth, or one such part of it: the same depth


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one study found of one method: the steps that it takes to a loss, over those of plain training.

    `advice` is the word that it belongs to, "async" or "local", `optimizer` a name of the table. `ratio` is the
    geometric mean over `seeds`, None where a seed never came to the loss; `low` and `high` are the ends of its 95 %
    interval, `high` None then. `gap` is how much higher the test loss was at the end, in % of plain training's.
    `losses` is how many train the model, `delay` the mean delay over stages, in updates.
    """

    advice: str
    study: str
    network: str
    optimizer: str
    stages: int
    method: str
    losses: int
    delay: float
    ratio: float | None
    low: float
    high: float | None
    gap: float
    seeds: int

    def steps(self) -> float:
        """The ratio of steps; infinite where a seed never came to the loss."""
        return self.ratio or math.inf

    def undecided(self, other: "Finding") -> bool:
        """Whether the intervals of the ratios have points in common, so that neither takes fewer steps."""
        ends = [math.inf if each.high is None else each.high for each in (self, other)]
        return self.low <= ends[1] and other.low <= ends[0]

    @property
    def error(self) -> float | None:
        """The standard error of `ratio` that its interval stands for; None where there is no ratio."""
        if self.ratio is None or self.high is None:
            return None
        return self.ratio * math.log(self.high / self.low) / (2 * STUDENT[self.seeds])

    @property
    def spread(self) -> str:
        """The ratio with its interval, or what it is above."""
        known = self.ratio is not None and self.high is not None
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]" if known else f"more than {self.low:.2f}"

    def __str__(self) -> str:
        where = f"{self.network}, {self.stages} stages, {self.optimizer}"
        return f"{self.spread} times the steps of plain training ({where})"


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""The 97.5 % quantiles of Student's distribution, by the number of values (one degree of freedom less)."""


@cache
def findings() -> tuple[Finding, ...]:
    """All that the studies found."""
    text = resources.files("stretto.methods").joinpath("findings.json").read_text(encoding="utf-8")
    return tuple(Finding(**entry) for entry in json.loads(text))


def kin(optimizer: str, studied: Collection[str]) -> str | None:
    """The studied optimizer that stands for one: itself, its nearest kin, AdamW, any; None if there is none."""
    return next((name for name in (optimizer, KIN.get(optimizer), UNKNOWN, *sorted(studied)) if name in studied), None)


def works_with(name: str, optimizer: str) -> bool:
    """Whether a method's cures work with an optimizer of this name; predictions, only where there is momentum."""
    cure = method(name).cure
    if optimizer == PLAIN_SGD:
        return not cure.optimizers and not cure.predictions
    return not cure.optimizers or optimizer in cure.optimizers


def compared(known: Sequence[Finding], stages: int) -> list[Finding]:
    """Of the networks at about the nearest depth the one on which most methods were tried; of two, the nearer one."""
    nearest, *_ = ordered = sorted(known, key=lambda each: (abs(math.log(each.stages / stages)), -each.stages))
    groups: dict[tuple[str, int], list[Finding]] = {}
    for each in ordered:
        if abs(math.log(each.stages / nearest.stages)) <= math.log(ABOUT):
            groups.setdefault((each.network, each.stages), []).append(each)
    return max(groups.values(), key=len)


def finding_for(advice: str, optimizer: str, stages: int, among: Sequence[Finding] | None = None) -> Finding:
    """The finding that the advice rests on: the fewest steps at the nearest depth (as a factor) under an optimizer.

    Methods are compared on one network: of those tried at about this depth the one on which most were. Of methods
    between which the intervals of the steps do not decide, the one with the lowest loss at the end. `optimizer` is a
    name of the table, or "plain-sgd" without momentum; one of no study stands for its nearest kin, AdamW where there
    is none, and methods that do not work with it are left out. Of two depths equally far the larger one counts. Raises
    UsageError where no study has such a method.
    """
    known = [each for each in (findings() if among is None else among) if each.advice == advice]
    own = kin(optimizer, {each.optimizer for each in known})
    suited = [each for each in known if each.optimizer == own and works_with(each.method, optimizer)]
    if not suited:
        raise UsageError(
            f"method {advice!r}: no study has found a method that works with {optimizer} yet: name a method instead"
        )
    there = compared(suited, stages)
    fewest = min(there, key=Finding.steps)
    return min((each for each in there if each.undecided(fewest)), key=lambda each: (each.gap, each.steps()))


def advised(chosen: str | Method, optimizer: str, stages: int) -> Method:
    """The method that "async" or "local" stands for under an optimizer of the table, on so many stages.

    "plain-sgd" is SGD without momentum, whose velocity no method can use. Options are added to the advice's own:
    "async(warmup=100)". Any other method is as `stretto.method` returns it. Raises UsageError where no study has such a
    method.
    """
    if not is_advised(chosen):
        return method(chosen)
    word, options = parse(chosen)
    name, own = parse(finding_for(word, optimizer, stages).method)
    return method(name, **{**own, **options})
