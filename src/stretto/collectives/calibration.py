"""What all-reduces take on this machine, as measured: which algorithm `auto` stands for."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.collectives.formulas import Link, formula
from stretto.collectives.library.double_tree import blocks_of
from stretto.collectives.library.hierarchical import nodes_of
from stretto.collectives.table import ALGORITHMS
from stretto.errors import UsageError

NOMINAL = Link(latency=1e-4, seconds_per_byte=1e-9, reduction_seconds_per_byte=2e-10)  # processes of one machine
ITEM = 4  # bytes of an element, where only bytes are known


@dataclass(frozen=True)
class Measured:
    """Seconds of each algorithm for tensors of one size."""

    bytes: int
    seconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        """The algorithm that took the shortest."""
        return min((name for name in self.seconds if name in ALGORITHMS), key=lambda name: self.seconds[name])


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """alpha, beta, gamma as fitted, and times as measured among so many workers, by size.

    `per_node` is what the hierarchical algorithm took for a node.
    """

    workers: int
    per_node: int
    link: Link
    measured: tuple[Measured, ...]

    @classmethod
    def read(cls, file: str | Path) -> "Calibration":
        """What `stretto calibrate --collectives --out FILE` wrote. Raises UsageError if it is something else."""
        try:
            return cls.of(tomllib.loads(Path(file).read_text(encoding="utf-8")))
        except OSError as error:
            raise UsageError(f"no calibration in {file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{file} is no calibration ({error}): write one with stretto calibrate --collectives --out {file}"
            ) from error

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Calibration":
        """From what `to_dict` gave."""
        rows = tuple(Measured(row["bytes"], dict(row["seconds"])) for row in content["all_reduce"])
        keys = ("latency", "seconds_per_byte", "reduction_seconds_per_byte")
        link = Link(**{key: float(content[key]) for key in keys})
        return cls(workers=content["workers"], per_node=content["per_node"], link=link, measured=rows)

    def to_dict(self) -> dict[str, Any]:
        """As TOML or JSON take it."""
        return {
            "workers": self.workers,
            "per_node": self.per_node,
            "latency": self.link.latency,
            "seconds_per_byte": self.link.seconds_per_byte,
            "reduction_seconds_per_byte": self.link.reduction_seconds_per_byte,
            "all_reduce": [
                {"bytes": row.bytes, "fastest": row.fastest, "seconds": dict(row.seconds)} for row in self.measured
            ],
        }

    def to_toml(self) -> str:
        """What `read` reads."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def fastest(self, size: int, num_bytes: int) -> str:
        """What was fastest at the nearest size; for another number of processes what the fitted formulas say."""
        if size != self.workers:
            return cheapest(self.link, size, num_bytes)
        wanted = math.log(max(num_bytes, 1))
        return min(self.measured, key=lambda row: abs(math.log(max(row.bytes, 1)) - wanted)).fastest


def cheapest(link: Link, size: int, num_bytes: int) -> str:
    """The algorithm whose formula gives the shortest time."""
    return min(ALGORITHMS, key=lambda name: predicted(name, link, size, num_bytes))


def predicted(algorithm: str, link: Link, size: int, num_bytes: int, per_node: int | None = None) -> float:
    """Seconds by formula."""
    blocks, node = blocks_of(num_bytes // ITEM), nodes_of(size, per_node)
    return link.seconds(formula(algorithm, size, num_bytes, blocks=blocks, per_node=node))
