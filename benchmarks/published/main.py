"""Published steps beside what `stretto plan` predicts for them: see README.md here.

python benchmarks/published/main.py [--held-out] [--ablation] [--only TEXT] [--out FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ablation import TERMS, without
from rows import HERE, ROOT, Row, read_rows

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
    """Run the row's command, on its cluster or on a copy of it."""
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.toml")
        command = [sys.executable, "-m", "stretto", *row.arguments(cluster), "--json", "--out", plan]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return Result(row, None, None, {}, said[-1] if said else f"exit status {done.returncode}")
    facts: dict[str, Any] = json.loads(done.stdout)
    predicted = facts["predicted"]
    return Result(row, facts["predicted_seconds"], max(facts["predicted_bytes"]), predicted["seconds"], None)


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
    """For each term of the model, the errors without it; and how it changes each prediction."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for term in TERMS:
            results = [predict(row, without(term, row.options["cluster"], Path(folder))) for row in rows]
            changes = {
                result.row.name: result.seconds / before.seconds - 1
                for result, before in zip(results, whole, strict=True)
                if result.seconds is not None and before.seconds is not None
            }
            found[term] = summary(results)["error"] | {"changes": changes}
            print(f"without {term}: {found[term]['mean']:.1%} mean, {found[term]['worst']:.1%} worst", flush=True)
    return found


def main() -> None:
    """Predict all rows, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true", help="the rows that were not looked at")
    parser.add_argument("--ablation", action="store_true", help="the rows without one term of the model at a time")
    parser.add_argument("--only", default="", help="rows whose name contains this text, or of this source")
    parser.add_argument("--out", type=Path, help="result.json or held_out.json here, unless --only is given")
    given = parser.parse_args()
    rows = [
        row for row in read_rows(held_out=given.held_out) if given.only in (row.source, "") or given.only in row.name
    ]
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
    file = given.out or (None if given.only else HERE / ("held_out.json" if given.held_out else "result.json"))
    if file is not None:
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
