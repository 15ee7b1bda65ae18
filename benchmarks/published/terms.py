"""What each term of the model does for rows that nobody had seen when it was written: see README.md here.

python benchmarks/published/terms.py [--only TEXT]

A term stays in the product only if its mean error is lower with it than without, over the rows of files that were first
predicted after it was written, and whose prediction it changes.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ablation import TERMS as OF_CLUSTERS
from ablation import Tables, attained, without
from main import predict
from rows import FILES, HERE, Row, read_rows

UNSEEN = {"A": FILES[2:], "B": FILES[3:], "C": FILES[4:]}
"""The files that were unseen: terms of round A were written on 2026-11-24 after 18:08, of B on 2026-11-25 before 20:24,
of C after it (`git log -- benchmarks/published`)."""
MODEL = "model-options."


class Term(NamedTuple):
    """A term: the round in which it was written, and what takes it from a row, or from a cluster's file.

    `option` and `value` are the option that asks for it, None for any value, and `instead` what the row says without.
    """

    round: str
    option: str = ""
    value: str | None = None
    instead: str | None = None
    of_cluster: Callable[[Tables], None] | None = None

    def taken_from(self, row: Row) -> Row:
        """The row without the term."""
        options = dict(row.options)
        if self.option in options and self.value in (None, str(options[self.option])):
            del options[self.option]
            if self.instead is not None:
                options[self.option] = self.instead
        return Row(row.name, row.source, row.place, row.measured, row.memory, options, row.flops)


def of_cluster(key: str) -> Callable[[Tables], None]:
    """Take what devices attain in one respect from a cluster's file."""

    def taken(cluster: Tables) -> None:
        for shares in attained(cluster):
            shares.pop(key, None)

    return taken


TERMS: Mapping[str, Term] = {
    "program: torch": Term("B", "program", "torch"),
    "program: megatron-2021": Term("B", "program", "megatron-2021"),
    "program: apex-2019, not torch": Term("B", "program", "apex-2019", "torch"),
    "attention: fused-2022, not fused": Term("A", f"{MODEL}attention", "fused-2022", "fused"),
    "attention: scaled-scores": Term("B", f"{MODEL}attention", "scaled-scores"),
    "fused: false": Term("A", f"{MODEL}fused"),
    "loss: megatron": Term("A", f"{MODEL}loss", "megatron"),
    "convolutional": Term("B", f"{MODEL}convolutional"),
    "memory format": Term("A", "memory-format"),
    "float16-autocast, not float16": Term("A", "dtype", "float16-autocast", "float16"),
    "bfloat16-autocast, not bfloat16": Term("A", "dtype", "bfloat16-autocast", "bfloat16"),
    "tfloat32, not float32": Term("A", "dtype", "tfloat32", "float32"),
    "kinds of kernels": Term("B", of_cluster=OF_CLUSTERS["kinds of kernels"]),
    "slowest of devices": Term("B", of_cluster=OF_CLUSTERS["slowest of devices"]),
    "starting kernels": Term("A", of_cluster=OF_CLUSTERS["starting kernels"]),
    "hosts": Term("C", of_cluster=OF_CLUSTERS["hosts"]),
    "protocols of collectives": Term("A", of_cluster=OF_CLUSTERS["protocols of collectives"]),
    "contention": Term("A", of_cluster=OF_CLUSTERS["contention"]),
    "sizes of products": Term("A", of_cluster=OF_CLUSTERS["sizes of products"]),
    "cache": Term("A", of_cluster=of_cluster("cache_bandwidth")),
    "products in a type": Term("A", of_cluster=of_cluster("products_in")),
    "rate of fused-2022": Term("A", of_cluster=of_cluster("attention_2022")),
}
GONE: Mapping[str, tuple[int, float | None, float | None]] = {
    "gelu: tanh or erf": (51, 0.0745, 0.0741),
    "indexed numbers": (39, 0.1295, 0.1270),
    "program: nemo-2024": (8, 0.211, 0.198),
    "odd products": (0, None, None),
    "whole tiles of fused attention": (0, None, None),
    **dict.fromkeys(
        (
            "heads_by", "class_tokens", "gates: apart", "norm: rms-torch, rms-float32", "positions: rotary-torch",
            "attention: float32-scores", "gelu: erf-kernel", "loss: gathered", "program: nemo-2023",
            "program: scaling-2023", "program: torch-graph",
        ),
        (0, None, None),
    ),
}  # fmt: skip
"""Terms that are gone: unseen rows that they changed, and the mean errors with and without them, on 2026-11-29."""


def seconds_of(row: Row, cluster: str | None = None) -> float | None:
    """What the row's plan takes; None where it is refused."""
    return predict(row, cluster).seconds


def errors(term: Term, whole: dict[str, float | None], folder: Path) -> list[tuple[float, float]]:
    """The errors with and without a term, of unseen rows whose prediction it changes."""
    found = []
    for row in (row for file in UNSEEN[term.round] for row in read_rows(file)):
        other, cluster = term.taken_from(row), None
        if term.of_cluster is not None:
            cluster = without(term.of_cluster, row.options["cluster"], folder)
        elif other == row:
            continue
        if row.name not in whole:
            whole[row.name] = seconds_of(row)
        before, after = whole[row.name], seconds_of(other, cluster)
        if before is not None and after is not None and abs(after / before - 1) > 1e-6:
            found.append((before / row.seconds - 1, after / row.seconds - 1))
    return found


def mean(values: Sequence[float]) -> float | None:
    """The mean of sizes; None without values."""
    return sum(map(abs, values)) / len(values) if values else None


def main() -> None:
    """Find the errors with and without each term, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="terms whose name contains this text")
    given = parser.parse_args()
    file = HERE / "terms.json"
    content: dict[str, Any] = json.loads(file.read_text()) if given.only and file.is_file() else {}
    whole: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, term in TERMS.items():
            if given.only not in name:
                continue
            pairs = errors(term, whole, Path(folder))
            with_it, without_it = mean([pair[0] for pair in pairs]), mean([pair[1] for pair in pairs])
            content[name] = {"round": term.round, "rows": len(pairs), "with": with_it, "without": without_it}
            print(name, content[name], flush=True)
            file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
