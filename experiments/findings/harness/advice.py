"""From the studies' stores to the file in the package that `method="async"` and `"local"` and plans rest on."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stretto
from harness import markdown
from harness.cells import SEEDS, Record, Study
from harness.halving import final_records
from harness.intervals import Interval, geometric_error
from harness.results import percent_above, ratio_to
from stretto.methods.advice import Finding, finding_for

DIGITS = 5  # of the numbers in the file
NEXT = 3  # methods beside the best one in the table


def entries(
    study: Study,
    finished: Mapping[str, Record],
    network: str,
    stages: int | None = None,
    where: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """What a study found of each cell that has losses of its own or old gradients; `network` is its name in messages.

    `stages` is on how many all cells train, where their settings do not say it. `where` leaves only cells with these
    settings. Cells that are not finished, or diverged, are left out, and so are methods of a file's own, cells with
    options of the optimizer, and those whose settings say `advises=False`. A cell that is shown beside another one
    counts against that. Of several cells of one method the last one counts, a control.
    """
    rows = {}
    for cell in study.cells:
        there = (where or {}).items() <= cell.settings.items()
        if not there or ":" in cell.method or "options" in cell.settings or not cell.settings.get("advises", True):
            continue
        chosen = stretto.method(cell.method)
        against = study.cell(cell.beside or cell.reference or cell.name)
        ratio = ratio_to(study, finished, cell, against)
        mine, theirs = (final_records(each, finished) for each in (cell, against))
        gap = percent_above(mine, theirs)
        if cell.reference is None or chosen.synchronous or ratio is None or gap is None:
            continue
        number = stages or int(cell.settings["stages"])
        delay = mean_delay(chosen, number)
        rows[cell.optimizer, number, str(chosen)] = {
            "advice": "local" if chosen.family == "local" else "async",
            "study": study.name,
            "network": network,
            "optimizer": cell.optimizer.lower(),
            "stages": number,
            "any_depth": chosen.family == "asynchronous" and delay == mean_delay(chosen, 2 * number),
            "method": str(chosen),
            "losses": len(chosen.reach(number).heads),
            "delay": rounded(delay),
            **steps(ratio),
            "gap": rounded(gap.mean),
            "gap_low": rounded(gap.low),
            "gap_high": rounded(gap.high),
            "memory": rounded(memory(mine)),
            "seeds": len(SEEDS),
        }
    return list(rows.values())


def mean_delay(chosen: stretto.Method, stages: int) -> float:
    """The mean delay over stages, in updates."""
    return statistics.fmean(chosen.delays(chosen.plan(stages)[0]).mean)


def memory(records: Mapping[int, Record]) -> float:
    """Numbers for each parameter: copies of the weights, and the optimizer's."""
    return float(sum(next(iter(records.values()))["memory"].values()))


def steps(ratio: Interval) -> dict[str, float | None]:
    """The ratio of steps as the file has it: None where a seed never arrived."""
    known = math.isfinite(ratio.high)
    return {
        "ratio": rounded(ratio.mean) if known else None,
        "low": rounded(ratio.low),
        "high": rounded(ratio.high) if known else None,
        "error": rounded(geometric_error(ratio)) if known else None,
    }


def rounded(value: float) -> float:
    """A number with few digits."""
    return float(f"{value:.{DIGITS}g}")


def table(found: Sequence[Finding]) -> str:
    """A Markdown table of the best method of each network, optimizer and depth, with the next ones there.

    What a word stands for at that depth is bold. What counts at any depth is among those of each depth; alone it stands
    for all other depths.
    """
    columns = (
        "`method=`", "optimizer", "stages", "network", "best", "steps to the loss, over plain training",
        "loss at the end", "memory", "the next ones there",
    )  # fmt: skip
    rows = []
    places = {(each.advice, each.optimizer, each.any_depth, each.stages, each.network) for each in found}
    for word, optimizer, any_depth, stages, network in sorted(places):
        tried = [each for each in found if (each.advice, each.optimizer, each.network) == (word, optimizer, network)]
        same = [each for each in tried if each.any_depth or (not any_depth and each.stages == stages)]
        best = finding_for(word, optimizer, stages, same)
        name = f"**`{best.method}`**" if finding_for(word, optimizer, stages, found) == best else f"`{best.method}`"
        others = sorted((each for each in same if each is not best), key=lambda each: each.gap)
        depth = str(stages)
        if any_depth:
            depth = "any other" if len(tried) > len(same) else "any"
        told = (
            f'`"{word}"`', optimizer, depth, network, name, best.spread, percent(best), f"{best.memory:.1f}",
            beside(best, others),
        )  # fmt: skip
        rows.append(told)
    return markdown.table(columns, rows)


def percent(finding: Finding) -> str:
    """How much higher the loss was at the end, with its interval."""
    return f"{finding.gap:+.1f} [{finding.gap_low:+.1f}, {finding.gap_high:+.1f}] %"


def beside(best: Finding, others: Sequence[Finding]) -> str:
    """The next ones, and how many more there are; = marks those that neither steps nor loss part from the best."""
    shown = [
        f"{'= ' * (each.as_soon_as(best) and each.as_low_as(best))}`{each.method}` {each.gap:+.1f} %"
        for each in others[:NEXT]
    ]
    more = len(others) - NEXT
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])]) or "none"


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
