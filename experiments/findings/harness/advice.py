"""From the studies' stores to the file in the package that `method="async"` and `"local"` and plans rest on."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stretto
from harness.cells import SEEDS, Cell, Record, Study
from harness.intervals import Interval
from harness.results import result
from stretto.methods.advice import Finding, finding_for

DIGITS = 5  # of the numbers in the file


def entries(
    study: Study,
    finished: Mapping[str, Record],
    network: str,
    stages: int | None = None,
    where: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """What a study found of each cell that has losses of its own or old gradients; `network` is its name in messages.

    `stages` is on how many all cells train, where their settings do not say it. `where` leaves only cells with these
    settings. Cells that are not finished, or diverged, are left out, and so are methods of a file's own and cells with
    options of the optimizer. A cell that is shown beside another one counts against that. Of several cells of one
    method the last one counts, a control.
    """
    rows = {}
    for cell in study.cells:
        there = (where or {}).items() <= cell.settings.items()
        if not there or ":" in cell.method or "options" in cell.settings:
            continue
        chosen = stretto.method(cell.method)
        found = result(study, finished, cell)
        ratio = found.ratio if cell.beside is None else found.beside
        if cell.reference is None or chosen.synchronous or ratio is None or found.loss is None:
            continue
        number = stages or int(cell.settings["stages"])
        rows[cell.optimizer, number, str(chosen)] = {
            "advice": "local" if chosen.family == "local" else "async",
            "study": study.name,
            "network": network,
            "optimizer": cell.optimizer.lower(),
            "stages": number,
            "method": str(chosen),
            "losses": len(chosen.reach(number).heads),
            "delay": rounded(statistics.fmean(chosen.delays(chosen.plan(number)[0]).mean)),
            **numbers(ratio),
            "gap": rounded(gap(study, finished, cell)),
            "seeds": len(SEEDS),
        }
    return list(rows.values())


def numbers(ratio: Interval) -> dict[str, float | None]:
    """An interval as the file has it: None where a seed never arrived."""
    known = math.isfinite(ratio.high)
    return {
        "ratio": rounded(ratio.mean) if known else None,
        "low": rounded(ratio.low),
        "high": rounded(ratio.high) if known else None,
    }


def gap(study: Study, finished: Mapping[str, Record], cell: Cell) -> float:
    """The last test loss above that of plain training, in %, both means over seeds."""
    reference = study.cell(cell.beside or cell.reference or cell.name)
    mine, theirs = (result(study, finished, each).loss for each in (cell, reference))
    assert mine is not None, "a ratio is known of finished cells alone"
    assert theirs is not None, "and of a reference that did not diverge"
    return 100 * (mine.mean / theirs.mean - 1)


def rounded(value: float) -> float:
    """A number with few digits."""
    return float(f"{value:.{DIGITS}g}")


def table(found: Sequence[Finding]) -> str:
    """A Markdown table of the best method of each network, optimizer and depth, with the others that were tried there.

    What a word stands for at that depth is bold.
    """
    columns = (
        "`method=`", "optimizer", "stages", "network", "best", "steps to the loss, over plain training",
        "loss at the end", "the others there",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for place in sorted({(each.advice, each.optimizer, each.stages, each.network) for each in found}):
        word, optimizer, stages, network = place
        same = [each for each in found if (each.advice, each.optimizer, each.stages, each.network) == place]
        best = finding_for(word, optimizer, stages, same)
        name = f"**`{best.method}`**" if finding_for(word, optimizer, stages, found) == best else f"`{best.method}`"
        others = sorted((each for each in same if each is not best), key=lambda each: each.gap)
        beside = ", ".join(f"`{each.method}` {each.gap:+.1f} %" for each in others) or "none"
        told = (f'`"{word}"`', optimizer, str(stages), network, name, best.spread, f"{best.gap:+.1f} %", beside)
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def write_table(page: Path, found: Sequence[Finding]) -> None:
    """Put the table where a page has its marks. Raises ValueError for a page without them."""
    marked, text = re.compile(r"(<!-- advice -->\n).*?(<!-- end -->)", re.DOTALL), page.read_text(encoding="utf-8")
    new, number = marked.subn(lambda match: f"{match[1]}\n{table(found)}\n{match[2]}", text)
    if number != 1:
        raise ValueError(f"{page}: {number} places between <!-- advice --> and <!-- end -->, not one")
    page.write_text(new, encoding="utf-8")


def write_findings(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write the package's file: an entry a line, so that changes can be read."""
    lines = ",\n".join(json.dumps(entry) for entry in found)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
