"""Rows of published measurements: what was measured, and the command that predicts it."""

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
UNITS = ("seconds", "examples_per_second", "examples_per_second_per_gpu", "tokens_per_second_per_gpu")


@dataclass(frozen=True)
class Row:
    """One published measurement.

    `measured` is a number in the unit that the source prints, by its name (`UNITS`); `memory` bytes on the fullest
    worker, None where the source does not say it. `options` are those of `stretto plan`, the source's included;
    `tokens` those of an example.
    """

    name: str
    source: str
    place: str
    measured: Mapping[str, float]
    memory: float | None
    options: Mapping[str, Any]
    tokens: int | None

    @property
    def seconds(self) -> float:
        """Seconds of a step, from whatever the source prints."""
        ((unit, value),) = self.measured.items()
        batch, workers = self.options["batch-size"], self.options["workers"]
        if unit == "seconds":
            return value
        if unit == "examples_per_second":
            return float(batch / value)
        if unit == "examples_per_second_per_gpu":
            return float(batch / (value * workers))
        assert self.tokens is not None, f"{self.name}: its source has no tokens"
        return float(batch * self.tokens / (value * workers))

    def arguments(self, cluster: str | None = None) -> list[str]:
        """Arguments of `stretto` that predict the row, on its own cluster or in a copy of it."""
        words = ["plan", "--all-workers"]
        for key, value in (self.options | ({} if cluster is None else {"cluster": cluster})).items():
            words += [f"--{key}", str(value)]
        return words

    @property
    def command(self) -> str:
        """The command as one line for a shell, from the root of the repository."""
        return shlex.join(["stretto", *self.arguments(), "--json"])


def read_rows(*, held_out: bool) -> list[Row]:
    """The rows that were looked at, or those that were not. Raises ValueError for a row that is not as described."""
    sources = tomllib.loads((HERE / "sources.toml").read_text())
    content = tomllib.loads((HERE / ("held_out.toml" if held_out else "rows.toml")).read_text())
    return [row_of(entry, sources[entry["source"]]) for entry in content["rows"]]


def row_of(entry: Mapping[str, Any], source: Mapping[str, Any]) -> Row:
    """A row from its table and its source's."""
    measured = entry["measured"]
    if len(measured) != 1 or not set(measured) <= set(UNITS):
        raise ValueError(f"{entry['name']}: measured = {measured}; give one of {', '.join(UNITS)}")
    options = source["options"] | entry["options"]
    ours = HERE / "clusters" / f"{options['cluster']}.toml"
    if ours.is_file():  # of this benchmark, not of the product
        options["cluster"] = ours.relative_to(ROOT).as_posix()
    return Row(
        entry["name"], entry["source"], entry["place"], measured, entry.get("memory"), options, source.get("tokens")
    )
