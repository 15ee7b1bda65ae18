"""How far test losses at the end are apart, for studies in which few cells arrive at the cut-off."""

from collections.abc import Iterable, Mapping

from harness.cells import Cell, Record
from harness.finals import Records, against, finals, shown
from harness.intervals import Interval, interval
from harness.results import TEST, curve


def percent_above(mine: Records | None, theirs: Records | None) -> Interval | None:
    """The last test loss above another cell's, in %, seed by seed; None while unknown, or where a seed diverged."""
    if mine is None or theirs is None or any(run["diverged"] for each in (mine, theirs) for run in each.values()):
        return None
    pairs = [(curve(mine[seed], TEST)[-1][1], curve(theirs[seed], TEST)[-1][1]) for seed in sorted(mine)]
    return interval([100 * (one / other - 1) for one, other in pairs])


def loss_table(finished: Mapping[str, Record], cells: Iterable[Cell]) -> str:
    """A row for each cell with a reference: its last loss above that one's, and above that without the cure."""
    cells = tuple(cells)
    found = finals(cells, finished)
    lines = [
        "| cell | last test loss above no delay, % | above no cure, % | against no cure |",
        "|---|---|---|---|",
    ]
    for cell in (each for each in cells if each.reference):
        mine, plain = found.get(cell.name), found.get(cell.beside or cell.reference or "")
        told = [shown(percent_above(mine, plain)), "", ""]
        if cell.uncured is not None:
            above = percent_above(mine, found.get(cell.uncured))
            told[1:] = [shown(above), against(above, 0, ("lower", "higher"))]
        lines.append(f"| {cell.name} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"
