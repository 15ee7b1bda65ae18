"""Tables of what cells have at their ends, for studies in which few arrive, or whose rules ask for test errors."""

from collections.abc import Iterable, Mapping, Sequence

from harness.cells import Cell, Record, Study
from harness.halving import final_records
from harness.intervals import Interval, against
from harness.markdown import table
from harness.results import Result, by_error, percent_above, points_above, result


def shown(value: Interval | None) -> str:
    """The interval in words; nothing while it is not known."""
    return "" if value is None else str(value)


def percent(found: Result, *, sign: bool = True) -> str:
    """The test error at the end in percent, with its interval, or why there is none."""
    if found.error is not None:
        return f"{plus_minus(found.error)}{' %' if sign else ''}"
    return (
        f"{found.diverged} of {len(found.records)} diverged"
        if found.complete
        else f"{len(found.records)} of {found.records.wanted} seeds"
    )


def plus_minus(error: Interval) -> str:
    """A test error in percent."""
    return f"{100 * error.mean:.1f} ± {100 * (error.high - error.mean):.1f}"


def error_table(study: Study, finished: Mapping[str, Record], cells: Iterable[Cell]) -> str:
    """A row for each cell: its error, how far it is above its reference's, and both verdicts."""
    rows = []
    for cell in cells:
        found, above, verdicts = result(study, finished, cell), None, ["", ""]
        if cell.reference is not None:
            reference = result(study, finished, study.cell(cell.reference))
            above, verdicts[0] = points_above(found.records, reference.records), by_error(found, reference)
        if cell.uncured is not None:
            verdict = by_error(found, result(study, finished, study.cell(cell.uncured)))
            verdicts[1] = f"{verdict} {'than' if verdict in ('better', 'worse') else 'against'} {cell.uncured}"
        points = "" if above is None else f"{above.mean:+.1f} [{above.low:+.1f}, {above.high:+.1f}]"
        rows.append([cell.name, percent(found, sign=False), points, *verdicts])
    head = ("cell", "test error at the end, %", "points above no delay", "against no delay", "against no cure")
    return table(head, rows)


def loss_table(finished: Mapping[str, Record], cells: Sequence[Cell]) -> str:
    """A row for each cell with a reference: its last loss above that one's, and above that without the cure."""
    records, rows = {cell.name: final_records(cell, finished) for cell in cells}, []
    for cell in cells:
        if cell.reference is None:
            continue
        mine = records[cell.name]
        told = [cell.name, shown(percent_above(mine, records[cell.beside or cell.reference])), "", ""]
        if cell.uncured is not None:
            above = percent_above(mine, records[cell.uncured])
            told[2:] = [shown(above), against(above, 0, ("lower", "higher"))]
        rows.append(told)
    return table(("cell", "last test loss above no delay, %", "above no cure, %", "against no cure"), rows)
