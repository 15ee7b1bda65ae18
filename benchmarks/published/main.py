"""Published steps beside what `stretto plan` predicts for them: see README.md here.

python benchmarks/published/main.py [--rows FILE] [--check] [--ablation] [--only TEXT] [--out FILE]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ablation import TERMS, without
from command_check import complaints
from predict import facts_of
from rows import FILES, HERE, LOOKED_AT, Row, read_rows

from stretto.errors import StrettoError

RESULTS = dict(zip(FILES, ("result.json", *(file.replace(".toml", ".json") for file in FILES[1:])), strict=True))
BARS = {"mean": 0.05, "worst": 0.10, "memory": 0.08}  # of the rows that were looked at, and of those that were not


class Result(NamedTuple):
    """What a row's command printed: seconds of a step, bytes of the fullest worker, terms of the step; or a refusal."""

    row: Row
    seconds: float | None
    memory: float | None
    terms: Mapping[str, float]
    refusal: str | None

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less 1."""
        return None if self.seconds is None else self.seconds / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured bytes, less 1; None where the source says none."""
        if self.memory is None or self.row.memory is None:
            return None
        return self.memory / self.row.memory - 1


def predict(row: Row, cluster: str | None = None) -> Result:
    """Plan the row, on its cluster or on a copy of it."""
    try:
        facts = facts_of(row.arguments(cluster))
    except StrettoError as error:
        return Result(row, None, None, {}, f"{error}")
    return Result(row, facts["predicted_seconds"], max(facts["predicted_bytes"]), facts["predicted"]["seconds"], None)


def percent(error: float | None) -> str:
    """An error as a signed percentage."""
    return "–" if error is None else f"{100 * error:+.1f}%"


def seconds_text(seconds: float | None) -> str:
    """Seconds with three digits or more."""
    return "refused" if seconds is None else f"{seconds:.2f}" if seconds >= 10 else f"{seconds:.4g}"


def gigabytes(many: float | None) -> str:
    """Bytes as GB."""
    return "–" if many is None else f"{many / 1e9:.1f}"


def line(result: Result) -> str:
    """A row of the table."""
    row = result.row
    cells = [
        row.name, seconds_text(row.seconds), seconds_text(result.seconds), percent(result.error),
        gigabytes(row.memory), gigabytes(result.memory), percent(result.memory_error),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = """| step | measured s | predicted s | error | measured GB | predicted GB | error |
|---|---|---|---|---|---|---|"""


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Means and worst of the errors, over all and by source."""
    errors = [result.error for result in results if result.error is not None]
    memory = [result.memory_error for result in results if result.memory_error is not None]
    sources = dict.fromkeys(result.row.source for result in results)
    return {
        "rows": len(results),
        "refused": sum(result.refusal is not None for result in results),
        "error": statistics_of(errors),
        "memory": statistics_of(memory),
        "by_source": {
            source: statistics_of([r.error for r in results if r.row.source == source and r.error is not None])
            for source in sources
        },
        "bars": BARS,
    }


def statistics_of(errors: Sequence[float]) -> dict[str, float] | None:
    """Mean and largest of the errors' sizes, and their mean with signs; None without errors."""
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    return {"mean": sum(sizes) / len(sizes), "worst": max(sizes), "bias": sum(errors) / len(errors)}


def plain(result: Result) -> dict[str, Any]:
    """A result for the file."""
    row = result.row
    return {
        "name": row.name, "source": row.source, "place": row.place, "command": row.command,
        "measured_seconds": row.seconds, "predicted_seconds": result.seconds, "error": result.error,
        "measured_bytes": row.memory, "predicted_bytes": result.memory, "memory_error": result.memory_error,
        "terms": dict(result.terms), "refusal": result.refusal,
    }  # fmt: skip


def ablate(rows: Sequence[Row], whole: Sequence[Result]) -> dict[str, Any]:
    """For each term of the model, the errors without it, and by how much each prediction changes."""
    found = {"bubble": changed(whole, [without_bubble(result) for result in whole])}
    with tempfile.TemporaryDirectory() as folder:
        for term, taken in TERMS.items():
            results = [predict(row, without(taken, row.options["cluster"], Path(folder))) for row in rows]
            found[term] = changed(whole, results)
    for term, errors in found.items():
        print(f"without {term}: {percent(errors['mean'])} mean, {percent(errors['worst'])} worst")
    return found


def without_bubble(result: Result) -> Result:
    """The same step without the seconds in which workers wait for each other."""
    return result if result.seconds is None else result._replace(seconds=result.seconds - result.terms["bubble"])


def changed(whole: Sequence[Result], results: Sequence[Result]) -> dict[str, Any]:
    """The errors of results, and their seconds over those of the whole model, less 1."""
    changes = {
        result.row.name: result.seconds / before.seconds - 1
        for result, before in zip(results, whole, strict=True)
        if result.seconds is not None and before.seconds is not None
    }
    return {**(summary(results)["error"] or {}), "changes": changes}


def main() -> None:
    """Predict all rows, print the table, and write it; or check their commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", choices=FILES, default=LOOKED_AT, help="the rows that were looked at, or held out")
    parser.add_argument("--check", action="store_true", help="check the rows' commands, and predict nothing")
    parser.add_argument("--ablation", action="store_true", help="the rows without one term of the model at a time")
    parser.add_argument("--only", default="", help="rows whose name contains this text, or of this source")
    parser.add_argument("--out", type=Path, help="the result's file here, as page.py names it, unless --only is given")
    given = parser.parse_args()
    rows = [row for row in read_rows(given.rows) if given.only in (row.source, "") or given.only in row.name]
    if given.check:
        found = complaints(rows)
        print(*found, f"{len(rows)} rows, {len(found)} complaints", sep="\n")
        sys.exit(1 if found else 0)
    results = []
    print(HEAD)
    for row in rows:
        results.append(predict(row))
        print(line(results[-1]), flush=True)
    content = {"rows": [plain(result) for result in results], "summary": summary(results)}
    print(json.dumps(content["summary"], indent=1))
    for result in results:
        if result.refusal:
            print(f"{result.row.name}: {result.refusal}")
    if given.ablation:
        content["ablation"] = ablate(rows, results)
    file = given.out or (None if given.only else HERE / RESULTS[given.rows])
    if file is not None:
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
