"""In which order the replicas of each stage have updated it: a log that another run can follow. No torch."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import UsageError


@dataclass(frozen=True)
class Order:
    """Of each stage: which replica made each update, and how stale it was, from the first update on."""

    replicas: Mapping[int, tuple[int, ...]]
    staleness: Mapping[int, tuple[int, ...]]

    def of(self, stage: int) -> tuple[int, ...]:
        """The replicas that updated a stage, one after the other."""
        return self.replicas.get(stage, ())

    def __str__(self) -> str:
        return f"{sum(map(len, self.replicas.values()))} updates of {len(self.replicas)} stages"

    def to_json(self) -> dict[str, Any]:
        """`{"0": {"replica": [...], "staleness": [...]}}`."""
        return {
            str(stage): {"replica": own, "staleness": self.staleness.get(stage, ())}
            for stage, own in self.replicas.items()
        }

    @staticmethod
    def of_json(given: Mapping[str, Any]) -> "Order":
        """What `to_json` gave."""
        return Order(
            {int(stage): tuple(map(int, each["replica"])) for stage, each in given.items()},
            {int(stage): tuple(map(int, each["staleness"])) for stage, each in given.items()},
        )

    @staticmethod
    def join(parts: Iterable["Order"]) -> "Order":
        """Orders of different stages, as one."""
        replicas: dict[int, tuple[int, ...]] = {}
        staleness: dict[int, tuple[int, ...]] = {}
        for part in parts:
            replicas.update(part.replicas)
            staleness.update(part.staleness)
        return Order(dict(sorted(replicas.items())), dict(sorted(staleness.items())))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Keep it as JSON."""
        Path(path).write_text(json.dumps({"stages": self.to_json()}))

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "Order":
        """What `write` has kept. Raises UsageError if the file is not such a log."""
        try:
            return Order.of_json(json.loads(Path(path).read_bytes())["stages"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} is no order of updates ({error}): give a file that Trainer.order().write(path) wrote"
            ) from error
