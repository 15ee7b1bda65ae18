"""From the studies' stores to the file in the package that `method="async"` and `"local"` and plans rest on."""

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import stretto
from harness import markdown
from harness.cells import Record, Study
from harness.halving import final_records
from harness.intervals import Interval, geometric_error
from harness.results import near_zero, percent_above, ratio_to
from stretto.methods.advice import FAMILY_OF, Way, plain_name, soonest, ways
from stretto.methods.findings import Finding

DIGITS = 5  # of the numbers in the file
NEXT = 2  # methods beside the best one in the table
DEPTHS = (2, 4, 8, 16, 32)  # stages in the table
EVERY_DEPTH = (*range(2, 17), 32)  # stages on which words are asked for their meaning
NAMES = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}


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
            **steps(ratio, len(mine)),
            "gap": rounded(gap.mean),
            "gap_low": rounded(gap.low),
            "gap_high": rounded(gap.high),
            "memory": rounded(memory(mine)),
            "seeds": len(mine),
            "compute": compute(mine, theirs),
        }
    return list(rows.values())


def mean_delay(chosen: stretto.Method, stages: int) -> float:
    """The mean delay over stages, in updates."""
    return statistics.fmean(chosen.delays(chosen.plan(stages)[0]).mean)


def memory(records: Mapping[int, Record]) -> float:
    """Numbers for each parameter: copies of the weights, and the optimizer's."""
    return float(sum(next(iter(records.values()))["memory"].values()))


def compute(mine: Mapping[int, Record], theirs: Mapping[int, Record]) -> float | None:
    """The compute of a step over that of the reference's, heads included; None where it was not counted."""
    counted = [[each["compute"]["total"] for each in of.values() if "compute" in each] for of in (mine, theirs)]
    return rounded(counted[0][0] / counted[1][0]) if all(counted) else None


def steps(ratio: Interval, seeds: int) -> dict[str, float | None]:
    """The ratio of steps as the file has it: None where a seed never arrived."""
    known = math.isfinite(ratio.high)
    return {
        "ratio": rounded(ratio.mean) if known else None,
        "low": rounded(ratio.low),
        "high": rounded(ratio.high) if known else None,
        "error": rounded(geometric_error(ratio, seeds)) if known else None,
    }


def rounded(value: float) -> float:
    """A number with few digits."""
    return float(f"{value:.{DIGITS}g}")


def table(found: Sequence[Finding], near: Collection[str] = ()) -> str:
    """A Markdown table of what words stand for by optimizer and depth, and of the method that it was decided by.

    That is the method that the word stands for, or else the one that comes nearest. `near` are the networks whose
    losses end so near 0 that the table says no percentage of them.
    """
    columns = (
        "`method=`", "optimizer", "stages", "stands for", "time to the loss, over `1f1b`", "steps to the loss",
        "a step takes", "loss at the end", "memory", "tried on", "the next ones",
    )  # fmt: skip
    rows = []
    for word, optimizer in sorted({(each.advice, each.optimizer) for each in found}):
        for stages in DEPTHS:
            tried = ways(word, optimizer, stages, among=found)
            best = soonest(tried)
            shown = best or tried[0]
            name = f"**`{best.method}`**" if best else f"`{plain_name(whole=False)}`; nearest: `{shown.method}`"
            rows.append([
                f'`"{word}"`', optimizer, str(stages), name, shown.spread, shown.finding.spread, f"{shown.turn:.2f}",
                percent(shown.finding, near), f"{shown.finding.memory:.1f}",
                f"{shown.finding.network}, {shown.finding.depth}",
                beside(shown, [each for each in tried if each is not shown]),
            ])  # fmt: skip
    return markdown.table(columns, rows)


def percent(finding: Finding, near: Collection[str] = ()) -> str:
    """How much higher the loss was at the end, with its interval; no percentage of a loss near 0."""
    if finding.network in near:
        return "n/a, near 0"
    return f"{finding.gap:+.1f} [{finding.gap_low:+.1f}, {finding.gap_high:+.1f}] %"


def beside(best: Way, others: Sequence[Way]) -> str:
    """The next ones with their times, and how many more there are; = marks those that are not told from the best."""
    shown = [
        f"{'= ' * (each.low <= best.high and best.low <= each.high)}`{each.method}` {each.spread}"
        for each in others[:NEXT]
    ]
    more = len(others) - NEXT
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])]) or "none"


def words(found: Sequence[Finding]) -> str:
    """What the words stand for by optimizer, on 2 to 32 stages: a list of two items."""
    lines = []
    for word in FAMILY_OF:
        told = [f"{NAMES[optimizer]}: {'; '.join(meant(word, optimizer, found))}" for optimizer in NAMES]
        lines.append(f'- `"{word}"`. {". ".join(told)}.')
    return "\n".join(lines)


def meant(word: str, optimizer: str, found: Sequence[Finding]) -> list[str]:
    """What a word stands for under an optimizer, from the fewest stages on: `1f1b`; from 4 stages on `pb`."""
    changes: list[tuple[int, str]] = []
    for stages in EVERY_DEPTH:
        best = soonest(ways(word, optimizer, stages, among=found))
        name = plain_name(whole=False) if best is None else best.finding.method
        if not changes or changes[-1][1] != name:
            changes.append((stages, name))
    return [f"{f'from {stages} stages on ' if index else ''}`{name}`" for index, (stages, name) in enumerate(changes)]


def ends_near_zero(study: Study, finished: Mapping[str, Record], where: Mapping[str, Any] | None = None) -> bool:
    """Whether some seed of some cell without delay, of those with these settings, ends at a test loss near 0."""
    alone = [cell for cell in study.cells if cell.reference is None and (where or {}).items() <= cell.settings.items()]
    return any(near_zero(final_records(cell, finished)) for cell in alone)


def write_findings(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write the package's file: an entry a line, so that changes can be read."""
    lines = ",\n".join(json.dumps(entry) for entry in found)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
