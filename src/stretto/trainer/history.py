"""What `Trainer.fit` returns: losses and metrics by epoch, and the loss of every step."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stretto.errors import nearest

Entry = dict[str, Any]
PLACES = ("epoch", "step")  # an entry's whole numbers


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
