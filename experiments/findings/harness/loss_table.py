"""How far test losses at the end are apart, for studies in which few cells arrive at the cut-off."""

from collections.abc import Mapping, Sequence

from harness.cells import Cell, Record
from harness.finals import against, shown
from harness.halving import final_records
from harness.results import percent_above


def loss_table(finished: Mapping[str, Record], cells: Sequence[Cell]) -> str:
    """A row for each cell with a reference: its last loss above that one's, and above that without the cure."""
    records = {cell.name: final_records(cell, finished) for cell in cells}
    lines = [
        "| cell | last test loss above no delay, % | above no cure, % | against no cure |",
        "|---|---|---|---|",
    ]
    for cell in cells:
        if cell.reference is None:
            continue
        mine = records[cell.name]
        told = [shown(percent_above(mine, records[cell.beside or cell.reference])), "", ""]
        if cell.uncured is not None:
            above = percent_above(mine, records[cell.uncured])
            told[1:] = [shown(above), against(above, 0, ("lower", "higher"))]
        lines.append(f"| {cell.name} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"
