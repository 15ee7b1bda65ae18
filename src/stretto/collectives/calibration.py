"""Measured times of all-reduces, by which `auto` chooses an algorithm."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.formulas import Link, formula
from stretto.collectives.library.double_tree import blocks_of
from stretto.collectives.library.ring import nodes_of
from stretto.errors import UsageError
from stretto.options.checks import path
from stretto.options.kinds import parse_toml

NOMINAL = Link(latency=1e-4, seconds_per_byte=1e-9, reduction_seconds_per_byte=2e-10)  # processes of one machine
ITEM = 4  # bytes of an element (float32), where only a number of bytes is known
FOREVER = 1e9  # seconds; a longer time cannot have been measured
RATES = ("latency", "seconds_per_byte", "reduction_seconds_per_byte")


@dataclass(frozen=True)
class SizeTimes:
    """Seconds of each algorithm, by name, for a tensor of `bytes` bytes."""

    bytes: int
    seconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        """The algorithm with the shortest time; torch's own does not count."""
        return min((name for name in self.seconds if name in ALGORITHMS), key=lambda name: self.seconds[name])


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted alpha, beta and gamma (`link`), and times measured among `workers` workers, by size.

    `per_node` is the number of ranks in a node of the hierarchical algorithm. `machines` is the number of machines of
    the workers, `host` the name of the first one ("" if unknown). Raises UsageError for numbers that cannot have been
    measured.
    """

    workers: int
    per_node: int
    link: Link
    measured: tuple[SizeTimes, ...]
    machines: int = 1
    host: str = ""

    def __post_init__(self) -> None:
        if not (is_count(self.workers) and self.workers > 1 and is_count(self.machines)):
            raise UsageError(
                f"workers={self.workers!r}, machines={self.machines!r}: give at least two workers, on at least one "
                "machine"
            )
        if not is_count(self.per_node) or self.workers % self.per_node:
            raise UsageError(f"per_node={self.per_node!r}: {self.workers} workers do not divide into such nodes")
        if not isinstance(self.host, str):
            raise UsageError(f"host={self.host!r}: the name of a machine belongs here")
        check_seconds({key: getattr(self.link, key) for key in RATES})
        if not self.measured:
            raise UsageError("all_reduce is empty: nothing has been measured")
        for row in self.measured:
            check_seconds(row.seconds)
            if not is_count(row.bytes) or not ALGORITHMS.keys() & row.seconds.keys():
                raise UsageError(
                    f"all_reduce of bytes={row.bytes!r} has times of {[*row.seconds]}: none is an algorithm"
                )

    @classmethod
    def read(cls, file: str | Path) -> "Calibration":
        """The calibration that `stretto calibrate --collectives --out FILE` wrote. UsageError for another file."""
        path("file", file)
        remedy = f"write one with stretto calibrate --collectives --workers N --out {file}"
        try:
            content = parse_toml(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"no calibration in {file}: {error.strerror}; {remedy}") from error
        except ValueError as error:
            raise UsageError(f"{file} is no calibration (no TOML: {error}): {remedy}") from error
        if "devices" in content:
            raise UsageError(f"{file} is no calibration (but a cluster, which stretto plan takes): {remedy}")
        try:
            return cls.of(content)
        except UsageError as error:
            raise UsageError(f"{file} is no calibration ({error}): {remedy}") from None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Calibration":
        """The calibration from the result of `to_dict`. Raises UsageError for other content."""
        try:
            rows = tuple(SizeTimes(row["bytes"], dict(row["seconds"])) for row in content["all_reduce"])
            link = Link(**{key: content[key] for key in RATES})
            optional = {key: content[key] for key in ("machines", "host") if key in content}
            return cls(workers=content["workers"], per_node=content["per_node"], link=link, measured=rows, **optional)
        except KeyError as error:
            raise UsageError(f"{error.args[0]} is missing") from error
        except (ValueError, TypeError) as error:
            raise UsageError(f"all_reduce is no list of tables with bytes and seconds ({error})") from error

    def to_dict(self) -> dict[str, Any]:
        """The calibration as a dictionary that TOML or JSON takes."""
        return {
            "workers": self.workers,
            "per_node": self.per_node,
            "machines": self.machines,
            "host": self.host,
            "latency": self.link.latency,
            "seconds_per_byte": self.link.seconds_per_byte,
            "reduction_seconds_per_byte": self.link.reduction_seconds_per_byte,
            "all_reduce": [
                {"bytes": row.bytes, "fastest": row.fastest, "seconds": dict(row.seconds)} for row in self.measured
            ],
        }

    def to_toml(self) -> str:
        """The calibration as TOML, which `read` reads from a file."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def fastest(self, size: int, num_bytes: int) -> str:
        """The algorithm that was fastest at the measured size nearest to `num_bytes` on a logarithmic scale.

        For another number of processes, `size`, than was measured: the fastest one by the fitted formulas.
        """
        if size != self.workers:
            return cheapest(self.link, size, num_bytes)
        log_bytes = math.log(max(num_bytes, 1))
        return min(self.measured, key=lambda row: abs(math.log(max(row.bytes, 1)) - log_bytes)).fastest


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 1; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_seconds(times: Mapping[str, Any]) -> None:
    """Raise UsageError unless all values are times in seconds."""
    for key, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < FOREVER:
            raise UsageError(f"{key}={value!r}: seconds, a number of at least 0, belong here")


def cheapest(link: Link, size: int, num_bytes: int) -> str:
    """The algorithm whose formula gives the shortest time."""
    return min(ALGORITHMS, key=lambda name: predicted(name, link, size, num_bytes))


def predicted(algorithm: str, link: Link, size: int, num_bytes: int, per_node: int | None = None) -> float:
    """Seconds of an all-reduce of `num_bytes` bytes by the algorithm's closed form."""
    blocks, node_size = blocks_of(num_bytes // ITEM), nodes_of(size, per_node)
    return link.seconds(formula(algorithm, size, num_bytes, blocks=blocks, per_node=node_size))
