"""From a study's finished runs to what its page says of every cell: arrivals, ratios, losses, verdicts."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from harness.cells import SEEDS, Cell, Claim, Record, Study
from harness.halving import at_edge, chosen_rate, final_records
from harness.intervals import Interval, Point, arrival, bounded, compared, interval, ratio, value_at

TEST, ERROR = 2, 3  # places in a point of a curve, behind the step and the training loss
PLACES = {"loss": TEST, "error": ERROR}


@dataclass(frozen=True)
class Result:
    """A cell after rung 2; what is not known yet, or has no meaning where seeds diverged, is None.

    `ratio` is of arrivals to the reference's, `beside` to the cell's `beside`; `gap` is the last test loss above the
    reference's, in %. `arrived` is the mean arrival in steps at the reference's cut-off, None where a seed never does.
    """

    cell: Cell
    records: Mapping[int, Record]
    rate: float | None
    edge: bool
    loss: Interval | None
    error: Interval | None
    arrived: float | None
    ratio: Interval | None
    beside: Interval | None
    gap: Interval | None

    @property
    def complete(self) -> bool:
        """Whether all seeds are there."""
        return len(self.records) == len(SEEDS)

    @property
    def diverged(self) -> int:
        """How many seeds diverged."""
        return sum(record["diverged"] is not None for record in self.records.values())


def curve(record: Record, place: int = TEST) -> list[Point]:
    """Steps and what a curve has there; evaluations that gave no number are left out."""
    return [(point[0], point[place]) for point in record["curve"] if point[place] is not None]


def cutoff_step(study: Study, reference: Cell, share: float | None = None) -> float:
    """The step of a reference at which its mean is the cut-off: the study's share of T, unless another is given."""
    return (study.share if share is None else share) * (reference.horizon or study.horizon)


def cutoff(study: Study, finished: Mapping[str, Record], reference: Cell, share: float | None = None) -> float | None:
    """The mean over seeds of a reference's test loss, or error, at that step; None while a seed is missing."""
    records = final_records(reference, finished)
    if len(records) < len(SEEDS) or any(record["diverged"] for record in records.values()):
        return None
    step, place = cutoff_step(study, reference, share), PLACES[study.metric]
    return statistics.fmean(value_at(curve(record, place), step) for record in records.values())


def result(study: Study, finished: Mapping[str, Record], cell: Cell) -> Result:
    """All that is known of a cell."""
    records = final_records(cell, finished)
    sound = len(records) == len(SEEDS) and not any(record["diverged"] for record in records.values())
    reference = study.cell(cell.reference or cell.name)
    cut = cutoff(study, finished, reference)
    arrivals = {} if cut is None else arrivals_of(study, records, cut)
    known = [steps for steps in arrivals.values() if steps is not None]
    return Result(
        cell=cell,
        records=records,
        rate=chosen_rate(cell, finished),
        edge=at_edge(cell, finished),
        loss=_last(records, TEST) if sound else None,
        error=_last(records, ERROR) if sound else None,
        arrived=statistics.fmean(known) if len(known) == len(SEEDS) else None,
        ratio=None if cell.reference is None else ratio_to(study, finished, cell, reference),
        beside=None if cell.beside is None else ratio_to(study, finished, cell, study.cell(cell.beside)),
        gap=percent_above(records, final_records(reference, finished)) if cell.reference else None,
    )


def ratio_to(
    study: Study, finished: Mapping[str, Record], cell: Cell, reference: Cell, share: float | None = None
) -> Interval | None:
    """The cell's arrivals over the reference's, at the reference's cut-off; None while a seed is missing."""
    cut, mine = cutoff(study, finished, reference, share), final_records(cell, finished)
    if cut is None or len(mine) < len(SEEDS):
        return None
    theirs = final_records(reference, finished)
    return ratio(
        arrivals_of(study, mine, cut),
        arrivals_of(study, theirs, cut),
        {seed: float(cell.steps) for seed in mine},
    )


def arrivals_of(study: Study, records: Mapping[int, Record], cut: float) -> dict[int, float | None]:
    """The arrival of each seed at a cut-off of the study's metric; None for one that never arrives."""
    place = PLACES[study.metric]
    return {seed: arrival(curve(record, place), cut) for seed, record in records.items()}


def _last(records: Mapping[int, Record], place: int) -> Interval:
    return interval([curve(record, place)[-1][1] for record in records.values()])


def percent_above(mine: Mapping[int, Record], theirs: Mapping[int, Record]) -> Interval | None:
    """The last test loss above the other cell's, in %, seed by seed; None where a seed is missing or diverged."""
    for records in (mine, theirs):
        if len(records) < len(SEEDS) or any(record["diverged"] for record in records.values()):
            return None
    pairs = [(curve(mine[seed])[-1][1], curve(theirs[seed])[-1][1]) for seed in SEEDS]
    return interval([100 * (one / other - 1) for one, other in pairs])


def judged(claim: Claim, results: Mapping[str, Result]) -> list[tuple[Result, Interval | None, str]]:
    """Each cell of a claim with its value and how this lies to the bound, the smallest mean first."""
    values = [
        (results[name], results[name].ratio if claim.kind == "ratio" else results[name].gap) for name in claim.cells
    ]
    rows = [(each, value, bounded(value, claim.bound)) for each, value in values]
    return sorted(rows, key=lambda row: (row[1] is None, *((row[1].mean, row[1].low) if row[1] else ())))


def outcome(claim: Claim, results: Mapping[str, Result]) -> str:
    """What becomes of the claim: "reached" by some cell, "missed" by all, "undecided" otherwise or not finished."""
    rows = judged(claim, results)
    told = {verdict for _, _, verdict in rows}
    if "reached" in told:
        return "reached"
    if all(each.complete for each, _, _ in rows):
        return "missed" if told == {"missed"} else "undecided"
    return "not finished"


def against_uncured(found: Result, results: Mapping[str, Result]) -> str:
    """Whether the cure is sooner than the same delay without it, by their ratios to the same reference."""
    if found.cell.uncured is None:
        return ""
    other = results[found.cell.uncured]
    one, two = found.ratio, other.ratio
    if found.cell.reference != other.cell.reference:
        one = found.beside  # a rotated cell: both against the optimizer that is not rotated
    if one is None or two is None:
        return "open"
    return {"less": "sooner", "more": "later", "undecided": "undecided"}[compared(one, two)]


def against_reference(found: Result) -> str:
    """Whether the cell is later than its reference: whether the whole interval of the ratio lies above 1."""
    if found.cell.reference is None:
        return ""
    if found.ratio is None:
        return "open"
    return {"less": "sooner", "more": "later", "undecided": "undecided"}[compared(found.ratio, Interval(1, 1, 1))]
