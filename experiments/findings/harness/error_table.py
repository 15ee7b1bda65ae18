"""Verdicts by the test error at the end, for studies whose rules ask for them."""

from collections.abc import Iterable, Mapping
from typing import Literal

from harness.cells import SEEDS, Cell, Record, Study
from harness.intervals import Interval, compared, interval
from harness.results import ERROR, Result, curve, result

Verdict = Literal["better", "worse", "undecided", "open"]


def by_error(one: Result, other: Result) -> Verdict:
    """Whether one cell has the smaller test error at the end: rule 9, by the difference seed by seed.

    "open" while a seed of either is missing; "undecided" where a seed diverged, as there is no interval then.
    """
    if not (one.complete and other.complete):
        return "open"
    verdicts: dict[str, Verdict] = {"less": "better", "more": "worse", "undecided": "undecided"}
    return verdicts[compared(points_above(one, other), Interval(0, 0, 0))]


def points_above(one: Result, other: Result) -> Interval | None:
    """How far the test error at the end is above another cell's, in percentage points, seed by seed.

    None while a seed is missing or where one diverged.
    """
    if one.error is None or other.error is None:
        return None
    pairs = [(curve(one.records[seed], ERROR)[-1][1], curve(other.records[seed], ERROR)[-1][1]) for seed in SEEDS]
    return interval([100 * (mine - theirs) for mine, theirs in pairs])


def percent(found: Result, *, sign: bool = True) -> str:
    """The test error at the end in percent, with its interval, or why there is none."""
    if found.error is not None:
        shown = f"{100 * found.error.mean:.1f} ± {100 * (found.error.high - found.error.mean):.1f}"
        return f"{shown} %" if sign else shown
    return f"{found.diverged} of {len(SEEDS)} diverged" if found.complete else f"{len(found.records)} of 3 seeds"


def error_table(study: Study, finished: Mapping[str, Record], cells: Iterable[Cell]) -> str:
    """A row for each cell: its error, how far it is above its reference's, and both verdicts."""
    lines = [
        "| cell | test error at the end, % | points above no delay | against no delay | against no cure |",
        "|---|---|---|---|---|",
    ]
    for cell in cells:
        found, above, verdicts = result(study, finished, cell), None, ["", ""]
        if cell.reference is not None:
            reference = result(study, finished, study.cell(cell.reference))
            above, verdicts[0] = points_above(found, reference), by_error(found, reference)
        if cell.uncured is not None:
            verdict = by_error(found, result(study, finished, study.cell(cell.uncured)))
            verdicts[1] = f"{verdict} {'than' if verdict in ('better', 'worse') else 'against'} {cell.uncured}"
        shown = "" if above is None else f"{above.mean:+.1f} [{above.low:+.1f}, {above.high:+.1f}]"
        lines.append(f"| {cell.name} | {percent(found, sign=False)} | {shown} | {' | '.join(verdicts)} |")
    return "\n".join(lines) + "\n"
