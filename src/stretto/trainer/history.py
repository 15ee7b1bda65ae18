"""What `Trainer.fit` returns, losses and metrics by epoch and the loss of every step; and when it stops early."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.errors import UsageError, nearest
from stretto.options.checks import flag, number, refuse, whole

PLACES = ("epoch", "step")  # an entry's whole numbers

Entry = dict[str, Any]


class History(Mapping[str, list[float]]):
    """Maps each key of the entries to its values, in their order; each is an attribute, too.

    `history["train_loss"]` and `history.train_loss` are the same list. There is an entry at each epoch's end, or as
    `fit` says. Keys: "epoch" and "step" (how many had begun or were done, from 1), "train_loss" (the mean over the
    examples of the steps since the entry before), "validation_loss", "validation_accuracy" and "validation_<metric>".

    `steps` has the loss of every step, at its own place under every method. `stopped` says what ended training early.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.steps: list[float] = []
        self.stopped: str | None = None

    def __getitem__(self, key: str) -> list[float]:
        values = [entry[key] for entry in self.entries if key in entry]
        if not values:
            raise KeyError(f"{key!r}: {nearest(str(key), self)}")
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for entry in self.entries for key in entry))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getattr__(self, name: str) -> list[float]:
        if "entries" in vars(self) and any(name in entry for entry in self.entries):
            return self[name]
        raise AttributeError(f"a History without {name!r}")

    def __repr__(self) -> str:
        keys = list(self)
        rows = [keys, *([_shown(entry.get(key), key) for key in keys] for entry in self.entries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.rjust, row, widths)) for row in rows if row]
        end = f"; stopped: {self.stopped}" if self.stopped else ""
        return "\n".join([f"History of {len(self.entries)} entries, {len(self.steps)} steps{end}", *table])


def _shown(value: Any, key: str) -> str:
    if value is None:
        return "-"
    return str(value) if key in PLACES or not math.isfinite(value) else f"{value:.4f}"


@dataclass(frozen=True)
class EarlyStop:
    """Stop once `patience` entries of the history in a row have not bettered the best one.

    `metric` is a key of the entries: "train_loss", "validation_loss", "validation_accuracy", or "validation_<name>" of
    one of `metrics`. An entry is better if it differs from the best by more than `least_change`, in the metric's own
    unit: upwards with `higher`, else downwards. nan is never better.

    Raises UsageError for a patience below 1, or a negative change.
    """

    patience: int
    metric: str = "validation_loss"
    least_change: float = 0.0
    higher: bool = False

    def __post_init__(self) -> None:
        whole("EarlyStop: patience", self.patience, 1)
        number("EarlyStop: least_change", self.least_change, 0)
        flag("EarlyStop: higher", self.higher)
        if not isinstance(self.metric, str):
            refuse("EarlyStop: metric", self.metric, "a key of the history's entries, such as 'validation_loss'")

    @staticmethod
    def of(value: Any, known: list[str]) -> "EarlyStop | None":
        """What a user gave: None, a patience or an EarlyStop. Raises UsageError unless its metric is among `known`."""
        if value is None:
            return None
        if not isinstance(value, EarlyStop):
            whole("fit: early_stop", value, 1)
        rule: EarlyStop = value if isinstance(value, EarlyStop) else EarlyStop(value)
        if rule.metric not in known:
            given = "" if "validation_loss" in known else ", or give validation="
            raise UsageError(
                f"fit: early_stop: metric {rule.metric!r} is not measured: choose {' or '.join(known)}{given}"
            )
        return rule


@dataclass
class Patience:
    """How long an EarlyStop has waited: `best` of all entries so far, and how many came after it."""

    rule: EarlyStop
    best: float | None = None
    entries: int = 0

    def should_stop(self, value: float) -> bool:
        """Whether to stop, now that the metric's next value is known."""
        gain = 0.0 if self.best is None else value - self.best if self.rule.higher else self.best - value
        if (self.best is None and value == value) or gain > self.rule.least_change:
            self.best, self.entries = value, 0
        else:
            self.entries += 1
        return self.waited

    @property
    def waited(self) -> bool:
        return self.entries >= self.rule.patience
