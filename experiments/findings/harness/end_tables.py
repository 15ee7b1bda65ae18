"""Tables of what cells have at their ends, for studies in which few arrive, or whose rules ask for test errors."""

from collections.abc import Iterable, Mapping, Sequence

from harness.cells import Cell, Record, Study
from harness.halving import final_records
from harness.intervals import Interval, against
from harness.markdown import table
from harness.results import (
    TEST,
    Records,
    Result,
    by_error,
    last_difference,
    near_zero,
    percent_above,
    points_above,
    result,
)


def shown(value: Interval | None) -> str:
    """The interval in words; nothing while it is not known."""
    return "" if value is None else str(value)


def above(mine: Records | None, theirs: Records | None, *, sign: bool = False) -> str:
    """How far the last test loss is above the other cell's: in %, but in nats where that one's is near 0.

    Nothing while it is not known. `sign` names % too, which columns do in their heads.
    """
    near = theirs is not None and near_zero(theirs)
    found = last_difference(mine, theirs, TEST) if near else percent_above(mine, theirs)
    if found is None:
        return ""
    unit = " nats" if near else " %" if sign else ""
    return f"{found.mean:.3g}{unit} in every run" if found.is_one_value else f"{found}{unit}"


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
    if error.is_one_value:
        return f"{100 * error.mean:.1f} in every run"
    return f"{100 * error.mean:.1f} ± {100 * (error.high - error.mean):.1f}"


def points(above: Interval | None) -> str:
    """How many percentage points an error is above another one; nothing while it is not known."""
    if above is None:
        return ""
    if above.is_one_value:
        return f"{above.mean:+.1f} in every run"
    return f"{above.mean:+.1f} [{above.low:+.1f}, {above.high:+.1f}]"


def error_table(study: Study, finished: Mapping[str, Record], cells: Iterable[Cell]) -> str:
    """A row for each cell: its error, how far it is above its reference's, and both verdicts."""
    rows = []
    for cell in cells:
        found, higher, verdicts = result(study, finished, cell), None, ["", ""]
        if cell.reference is not None:
            reference = result(study, finished, study.cell(cell.reference))
            higher, verdicts[0] = points_above(found.records, reference.records), by_error(found, reference)
        if cell.uncured is not None:
            verdict = by_error(found, result(study, finished, study.cell(cell.uncured)))
            verdicts[1] = f"{verdict} {'than' if verdict in ('better', 'worse') else 'against'} {cell.uncured}"
        rows.append([cell.name, percent(found, sign=False), points(higher), *verdicts])
    head = ("cell", "test error at the end, %", "points above no delay", "against no delay", "against no cure")
    return table(head, rows)


def loss_table(finished: Mapping[str, Record], cells: Sequence[Cell]) -> str:
    """A row for each cell with a reference: its last loss above that one's, and above that without the cure."""
    records, rows = {cell.name: final_records(cell, finished) for cell in cells}, []
    for cell in cells:
        if cell.reference is None:
            continue
        mine = records[cell.name]
        told = [cell.name, above(mine, records[cell.beside or cell.reference]), "", ""]
        if cell.uncured is not None:
            plain = records[cell.uncured]
            told[2:] = [above(mine, plain), against(percent_above(mine, plain), 0, ("lower", "higher"))]
        rows.append(told)
    return table(("cell", "last test loss above no delay, %", "above no cure, %", "against no cure"), rows)
