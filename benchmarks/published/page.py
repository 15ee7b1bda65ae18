"""Write the tables of README.md here from the results of main.py and parts.py, as far as they are there.

python benchmarks/published/page.py
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from main import BARS, HEAD, RESULTS, percent
from rows import HERE, read_rows
from terms import GONE


def rows_table(name: str) -> str:
    """Measured and predicted, row by row, and the errors of all."""
    content = read(name)
    if content is None:
        return "Not run yet."
    lines = [line(row) for row in content["rows"]]
    return "\n".join([HEAD, *lines, "", *summary_lines(content["summary"])])


def line(row: Mapping[str, Any]) -> str:
    """One row of a result's file."""
    cells = [
        row["name"], seconds(row["measured_seconds"]), seconds(row["predicted_seconds"]), percent(row["error"]),
        gigabytes(row["measured_bytes"]), gigabytes(row["predicted_bytes"]), percent(row["memory_error"]),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def seconds(value: float | None) -> str:
    """Seconds with three digits."""
    return "refused" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def gigabytes(value: float | None) -> str:
    """Bytes as GB."""
    return "–" if value is None else f"{value / 1e9:.1f}"


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Means and worst, beside the bars."""
    error, memory = summary["error"], summary["memory"]
    lines = ["| errors' sizes | mean | worst | bars |", "|---|---|---|---|"]
    if error:
        bars = f"{BARS['mean']:.0%} mean, {BARS['worst']:.0%} worst"
        lines.append(f"| all {summary['rows']} | {error['mean']:.1%} | {error['worst']:.1%} | {bars} |")
    lines += [
        f"| {source} | {each['mean']:.1%} | {each['worst']:.1%} | |"
        for source, each in summary["by_source"].items()
        if each
    ]
    if memory:
        lines.append(f"| memory | {memory['mean']:.1%} | {memory['worst']:.1%} | {BARS['memory']:.0%} |")
    return lines


def commands() -> str:
    """The command of every row that was predicted, those that were looked at first."""
    every = [row for file, result in RESULTS.items() if (HERE / result).is_file() for row in read_rows(file)]
    return "\n".join(["```text", *(f"# {row.name}: {row.place}\n{row.command}" for row in every), "```"])


def parts() -> str:
    """A layer of 22B, and the step of 175B."""
    content = read("parts.json")
    if content is None:
        return "Not run yet."
    lines = [
        "| recomputation | sequence parallel | measured: forward + backward | ours | error | computing | exchanges |",
        "|---|---|---|---|---|---|---|",
    ]
    for layer in content["layer"]:
        terms, (forward, backward) = layer["terms"], layer["measured"]
        sent = terms["inside_stages"]
        cells = [
            layer["recompute"], layer["sequence_parallel"], f"{forward} + {backward} = {forward + backward:.1f} ms",
            f"{layer['predicted']:.1f} ms", percent(layer["predicted"] / (forward + backward) - 1),
            f"{layer['predicted'] - sent:.1f}", f"{sent:.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *step_lines(content["step"])])


def step_lines(step: Mapping[str, Any]) -> list[str]:
    """Where the step of 175B goes, term by term."""
    lines = ["| term of the plan | seconds | share |", "|---|---|---|"]
    lines += [
        f"| {term.replace('_', ' ')} | {value:.2f} | {value / step['seconds']:.1%} |"
        for term, value in step["terms"].items()
        if abs(value) >= 0.005
    ]
    return [*lines, f"| all | {step['seconds']:.2f} | measured: {step['measured']:.2f} |"]


def ablation() -> str:
    """The errors without one term at a time, over the rows of result.json's ablation."""
    content = read("ablation.json")
    if content is None:
        return "Not run yet."
    chosen: Sequence[str] = [row["name"] for row in content["rows"]]
    lines = [f"| without | mean | worst | {' | '.join(chosen)} |", f"|---|---|---|{'---|' * len(chosen)}"]
    whole = content["summary"]["error"]
    errors = [percent(row["error"]) for row in content["rows"]]
    lines.append(f"| nothing | {whole['mean']:.1%} | {whole['worst']:.1%} | {' | '.join(errors)} |")
    for term, found in content["ablation"].items():
        changes = [percent(found["changes"].get(name)) for name in chosen]
        lines.append(f"| {term} | {found['mean']:.1%} | {found['worst']:.1%} | {' | '.join(changes)} |")
    return "\n".join(lines)


def terms() -> str:
    """What each term does for rows that were unseen when it was written."""
    content = read("terms.json")
    if content is None:
        return "Not run yet."
    lines = ["| term | unseen rows that it changes | mean error with it | without | |", "|---|---|---|---|---|"]
    for name, found in content.items():
        lower = found["rows"] and found["with"] < found["without"]
        means = " | ".join(mean_text(found[key]) for key in ("with", "without"))
        lines.append(f"| {name} | {found['rows']} | {means} | {'stays' if lower else 'goes'} |")
    for name, (rows, *pair) in GONE.items():
        lines.append(f"| {name} | {rows} | {' | '.join(map(mean_text, pair))} | gone |")
    return "\n".join(lines)


def mean_text(error: float | None) -> str:
    """A mean error with as many digits as tell two of them apart."""
    return "–" if error is None else f"{error:.2%}"


def read(name: str) -> Any:
    """A result's file; None if it is not there."""
    file = HERE / name
    return json.loads(file.read_text()) if file.is_file() else None


def main() -> None:
    """Replace what stands between a table's marks."""
    tables = {
        "rows": rows_table("result.json"), "held out": rows_table("held_out.json"),
        "held out 2": rows_table("held_out_2.json"), "held out 3": rows_table("held_out_3.json"),
        "held out 4": rows_table("held_out_4.json"), "parts": parts(), "ablation": ablation(), "commands": commands(),
        "terms": terms(),
    }  # fmt: skip
    page = (HERE / "README.md").read_text()
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = marked.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", page)
    (HERE / "README.md").write_text(page)


if __name__ == "__main__":
    main()
