"""What this package's own studies found of methods, by optimizer and depth: `findings.json`, and how it is read.

The studies' command (experiments/findings) makes the file, and nothing else does.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from stretto.methods.table import method

PLAIN_SGD = "plain-sgd"  # SGD without momentum, or with Nesterov's: it has no velocity that a cure could read
KIN = {"adam": "adamw", "lamb": "adamw", "lars": "sgd", PLAIN_SGD: "sgd"}
"""An optimizer of no study, and the studied one nearest to it."""
UNKNOWN = "adamw"  # stands for any other
ABOUT = 1.25  # depths within this factor count as the same


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one study found of one method: the steps that it takes to a loss, over those of plain training.

    `advice` is the word that it belongs to, "async" or "local", `optimizer` a name of the table. `any_depth` says that
    its delay is the same on any number of stages, so that it was tried at every depth at once. `ratio` is the geometric
    mean over `seeds`, None where a seed never came to the loss; `low` and `high` are the ends of its 95 % interval and
    `error` is its standard error, `high` and `error` None then. `gap` is how much higher the test loss was at the end,
    in % of plain training's with the same seed, `gap_low` and `gap_high` are the ends of its interval. `losses` is how
    many train the model, `delay` the mean delay over stages, in updates. `memory` is in numbers for each parameter:
    copies of the weights, and the optimizer's. `compute` is that of a step over plain training's, heads included; None
    where the study did not count it.
    """

    advice: str
    study: str
    network: str
    optimizer: str
    stages: int
    any_depth: bool
    method: str
    losses: int
    delay: float
    ratio: float | None
    low: float
    high: float | None
    error: float | None
    gap: float
    gap_low: float
    gap_high: float
    memory: float
    seeds: int
    compute: float | None = None

    @property
    def ratio_or_infinite(self) -> float:
        """The ratio of steps; infinite where a seed never came to the loss."""
        return math.inf if self.ratio is None else self.ratio

    @property
    def spread(self) -> str:
        """The ratio with its interval, or what it is above."""
        known = self.ratio is not None and self.high is not None
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]" if known else f"more than {self.low:.2f}"

    @property
    def depth(self) -> str:
        """The number of stages on which it was tried, in words."""
        return "any number of stages" if self.any_depth else f"{self.stages} stages"

    def __str__(self) -> str:
        return f"{self.spread} times the steps of plain training ({self.network}, {self.depth}, {self.optimizer})"


@cache
def findings() -> tuple[Finding, ...]:
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


def tried_together(known: Sequence[Finding], stages: int) -> list[Finding]:
    """Of the networks at about the nearest depth the findings of that on which most methods were tried.

    Of two with as many, the nearer one. What counts at any depth counts at each depth of its network.
    """

    def depth(finding: Finding) -> int:
        return stages if finding.any_depth else finding.stages

    def distance(number: int) -> tuple[float, int]:
        return abs(math.log(number / stages)), -number

    nearest = min(map(depth, known), key=distance)
    about = {each for each in map(depth, known) if abs(math.log(each / nearest)) <= math.log(ABOUT)}
    places = sorted({(distance(depth(each)), depth(each), each.network) for each in known if depth(each) in about})
    groups = [
        [each for each in known if each.network == network and (each.any_depth or each.stages == number)]
        for _, number, network in places
    ]
    return max(groups, key=len)


def rows_for(advice: str, optimizer: str, among: Sequence[Finding] | None = None) -> list[Finding]:
    """What was found of one word's methods under an optimizer, or under the one nearest to it that was studied.

    `optimizer` is a name of the table, or "plain-sgd" without momentum. Methods that do not work with it are left out.
    """
    known = [each for each in (findings() if among is None else among) if each.advice == advice]
    own = kin(optimizer, {each.optimizer for each in known})
    return [each for each in known if each.optimizer == own and works_with(each.method, optimizer)]
