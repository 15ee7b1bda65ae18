"""The order in which replicas have updated each stage: a log that another run can follow. No torch."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import UsageError


@dataclass(frozen=True)
class Order:
    """By stage: the replica that made each update, and the update's staleness, from the first update on."""

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
            str(stage): {"replica": replicas, "staleness": self.staleness.get(stage, ())}
            for stage, replicas in self.replicas.items()
        }

    @staticmethod
    def of_json(stages: Mapping[str, Any]) -> "Order":
        """The order from the result of `to_json`."""
        return Order(
            {int(stage): tuple(map(int, log["replica"])) for stage, log in stages.items()},
            {int(stage): tuple(map(int, log["staleness"])) for stage, log in stages.items()},
        )

    @staticmethod
    def join(parts: Iterable["Order"]) -> "Order":
        """One order of all stages, from orders of different stages."""
        replicas: dict[int, tuple[int, ...]] = {}
        staleness: dict[int, tuple[int, ...]] = {}
        for part in parts:
            replicas.update(part.replicas)
            staleness.update(part.staleness)
        return Order(dict(sorted(replicas.items())), dict(sorted(staleness.items())))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the order to a file, as JSON."""
        Path(path).write_text(json.dumps({"stages": self.to_json()}))

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "Order":
        """The order from a file that `write` wrote. Raises UsageError if the file is none, or cannot be read."""
        try:
            return Order.of_json(json.loads(Path(path).read_bytes())["stages"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} is no order of updates ({error}): give a file that Trainer.order().write(path) wrote"
            ) from error
