"""When to stop because a figure no longer gets better."""

from dataclasses import dataclass
from typing import Any

from stretto.errors import UsageError
from stretto.options.checks import flag, number, refuse, whole


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

    def stops(self, value: float) -> bool:
        """Whether to stop, now that the metric's next value is known."""
        gain = 0.0 if self.best is None else value - self.best if self.rule.higher else self.best - value
        if (self.best is None and value == value) or gain > self.rule.least_change:
            self.best, self.entries = value, 0
        else:
            self.entries += 1
        return self.waited

    @property
    def waited(self) -> bool:
        """Whether the patience is at its end."""
        return self.entries >= self.rule.patience
