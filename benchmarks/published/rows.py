"""Rows of published measurements: what was measured, and the command that predicts it."""

import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
UNITS = (
    "seconds", "examples_per_second", "examples_per_second_per_gpu", "tokens_per_second", "tokens_per_second_per_gpu",
    "teraflops_per_second_per_gpu", "percent_of_312_teraflops_per_gpu",
)  # fmt: skip
FILES = ("rows.toml", "held_out.toml", "held_out_2.toml", "held_out_3.toml", "held_out_4.toml")
LOOKED_AT = FILES[0]


@dataclass(frozen=True)
class Row:
    """One published measurement.

    `measured` is a number in the unit that the source prints, by its name (`UNITS`); `memory` bytes on the fullest
    worker, None where the source does not say it. `options` are those of `stretto plan`, the source's included. `flops`
    names the formula (`FLOPS`) by which a source counts what it prints as FLOPs.
    """

    name: str
    source: str
    place: str
    measured: Mapping[str, float]
    memory: float | None
    options: Mapping[str, Any]
    flops: str | None

    @property
    def seconds(self) -> float:
        """Seconds of a step, from whatever the source prints."""
        ((unit, value),) = self.measured.items()
        if unit == "seconds":
            return value
        amount = float(self.options["batch-size"])
        if unit.startswith("tokens"):
            amount *= self.options["model-options.context"]
        elif unit.startswith(("teraflops", "percent")):
            assert self.flops is not None, f"{self.name}: its source has no formula of FLOPs"
            amount *= FLOPS[self.flops](self.options) / (1e12 if unit.startswith("teraflops") else 3.12e12)
        return amount / (value * (self.options["workers"] if unit.endswith("per_gpu") else 1))

    def arguments(self, cluster: str | None = None) -> list[str]:
        """Arguments of `predict.py` that predict the row, on its own cluster or in a copy of it."""
        words = ["--all-workers"]
        for key, value in (self.options | ({} if cluster is None else {"cluster": cluster})).items():
            words += [f"--{key}", str(value)]
        return words

    @property
    def command(self) -> str:
        """The command as one line for a shell, from the root of the repository."""
        planner = ["python", "benchmarks/published/predict.py"] if "program" in self.options else ["stretto", "plan"]
        return shlex.join([*planner, *self.arguments(), "--json"])


def narayanan_flops(options: Mapping[str, Any]) -> float:
    """FLOPs of an example, its second forward included: equation 3 of Narayanan et al. 2021, for one sequence."""
    layers, width, tokens, words = shape_of(options)
    return 96 * tokens * layers * width**2 * (1 + tokens / (6 * width) + words / (16 * layers * width))


def dao_flops(options: Mapping[str, Any]) -> float:
    """FLOPs of an example: 6 a token and weight, and attention without regard to its mask (Dao 2023, section 4.2)."""
    layers, width, tokens, words = shape_of(options)
    weights = layers * (12 * width**2 + 13 * width) + (words + tokens) * width
    return 6 * tokens * weights + 12 * layers * width * tokens**2


def yeung_flops(options: Mapping[str, Any]) -> float:
    """FLOPs of an example: its products alone, and attention without regard to its mask (Yeung et al. 2024)."""
    layers, width, tokens, words = shape_of(options)
    return 6 * tokens * width * words + layers * (72 * tokens * width**2 + 12 * tokens**2 * width)


FLOPS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "narayanan": narayanan_flops, "dao": dao_flops, "yeung": yeung_flops,
}  # fmt: skip


def shape_of(options: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Layers, width, tokens of a sequence and of the vocabulary."""
    layers, width, tokens, words = (
        options[f"model-options.{key}"] for key in ("depth", "width", "context", "vocabulary")
    )
    return layers, width, tokens, words


def read_rows(file: str) -> list[Row]:
    """The rows of one of FILES. Raises ValueError for a row that is not as described."""
    sources = tomllib.loads((HERE / "sources.toml").read_text())
    content = tomllib.loads((HERE / file).read_text())
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
        entry["name"], entry["source"], entry["place"], measured, entry.get("memory"), options, source.get("flops")
    )
