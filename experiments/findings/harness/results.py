"""From a study's finished runs to what its page says of every cell: arrivals, ratios, losses, verdicts.

All quantities are formed seed by seed. They are None while a seed is missing, and what runs have at their ends also
where a seed diverged.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from harness.cells import Cell, Claim, Record, Study
from harness.halving import Finals, at_edge, chosen_rate, final_records
from harness.intervals import Interval, Point, against, arrival, bounded, interval, ratio, value_at

TRAINING, TEST, ERROR = 1, 2, 3  # places in a point of a curve, behind the step
PLACES = {"loss": TEST, "error": ERROR, "training": TRAINING}
Records = Finals
"""The runs of rung 2 of a cell, by seed."""
SOONER = ("sooner", "later")
NEAR_ZERO = 0.1  # nats: of a loss below it pages say no percentage (rules.md, Pages)


@dataclass(frozen=True)
class Result:
    """A cell after rung 2; what is not known yet, or has no meaning where seeds diverged, is None.

    `ratio` is of arrivals to the reference's, `beside` to the cell's `beside`; `gap` is the last test loss above the
    reference's, in %. `arrived` is the mean arrival in steps at the reference's cut-off, None where a seed never does.
    """

    cell: Cell
    records: Records
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
        return complete(self.records)

    @property
    def diverged(self) -> int:
        """How many seeds diverged."""
        return sum(record["diverged"] is not None for record in self.records.values())


def finals(cells: Iterable[Cell], finished: Mapping[str, Record]) -> dict[str, Records]:
    """Rung 2 of each cell whose seeds are all there, by the cell's name."""
    found = {cell.name: final_records(cell, finished) for cell in cells}
    return {name: records for name, records in found.items() if complete(records)}


def complete(records: Records) -> bool:
    """Whether all seeds are there."""
    return len(records) == records.wanted


def sound(*cells: Records) -> bool:
    """Whether all seeds of all of them are there and none diverged."""
    return all(complete(records) and not any(each["diverged"] for each in records.values()) for records in cells)


def curve(record: Record, place: int = TEST) -> list[Point]:
    """Steps and what a curve has there; evaluations that gave no number are left out."""
    return [(point[0], point[place]) for point in record["curve"] if point[place] is not None]


def ends(records: Records, place: int = TEST) -> list[float]:
    """What each seed has at its end."""
    return [curve(records[seed], place)[-1][1] for seed in sorted(records)]


def last(records: Records | None, place: int = TEST) -> Interval | None:
    """What a cell has at its end."""
    return interval(ends(records, place)) if records and sound(records) else None


def percent_above(mine: Records | None, theirs: Records | None) -> Interval | None:
    """The last test loss above the other cell's, in %."""
    return _compared_ends(mine, theirs, TEST, lambda one, other: 100 * (one / other - 1))


def near_zero(records: Records) -> bool:
    """Whether the last test loss of some seed is so near 0 that a percentage of it says nothing."""
    return bool(records) and sound(records) and min(ends(records)) < NEAR_ZERO


def points_above(mine: Records | None, theirs: Records | None) -> Interval | None:
    """How far the test error at the end is above another cell's, in percentage points."""
    return _compared_ends(mine, theirs, ERROR, lambda one, other: 100 * (one - other))


def _compared_ends(
    mine: Records | None, theirs: Records | None, place: int, form: Callable[[float, float], float]
) -> Interval | None:
    if not mine or not theirs or not sound(mine, theirs):
        return None
    return interval(list(map(form, ends(mine, place), ends(theirs, place))))


def last_difference(mine: Records | None, theirs: Records | None, place: int) -> Interval | None:
    """What a cell has at its end minus what the other one has at that step."""
    if not mine or not theirs or not sound(mine, theirs):
        return None
    points = {seed: curve(mine[seed], place)[-1] for seed in sorted(mine)}
    return interval([value - value_at(curve(theirs[seed], place), step) for seed, (step, value) in points.items()])


def cut_at(records: Records | None, place: int, share: float) -> float | None:
    """The cut-off of a reference at this share of its steps."""
    return reached_by(records, place, share * next(iter(records.values()))["steps"]) if records else None


def reached_by(records: Records, place: int, step: float) -> float | None:
    """What every seed of a reference has reached at a step: the largest of the least values so far (rule 7)."""
    if not sound(records):
        return None
    return max(
        min(value_at(curve(record, place), step), *(value for at, value in curve(record, place) if at <= step))
        for record in records.values()
    )


def cutoff_step(study: Study, reference: Cell) -> float:
    """The step of a reference by which every seed has reached the cut-off: the study's share of T."""
    return study.share * (reference.horizon or study.horizon)


def cutoff(study: Study, finished: Mapping[str, Record], reference: Cell) -> float | None:
    """What every seed of a reference has reached by that step, in test loss, test error or training loss."""
    return reached_by(final_records(reference, finished), PLACES[study.metric], cutoff_step(study, reference))


def arrivals(records: Records, place: int, cut: float, *, entered: bool = False) -> dict[int, float | None]:
    """The arrival of each seed at a cut-off, in updates of the slowest stage; None for one that never arrives.

    `entered` counts minibatches that have entered, as time does.
    """
    found = {seed: arrival(curve(record, place), cut) for seed, record in records.items()}
    late = lateness(records, place, entered=entered)
    return {seed: None if step is None else max(0.0, step - late) for seed, step in found.items()}


def lateness(records: Records, place: int, *, entered: bool) -> int:
    """By how many steps what a curve has is older than the minibatches that have entered."""
    if place == TRAINING:
        return records.late
    return 0 if entered else records.behind


def ratio_at(
    mine: Records | None, theirs: Records | None, place: int, cut: float | None, *, entered: bool = False
) -> Interval | None:
    """Steps to a cut-off over those of the other cell, in updates or in minibatches that have `entered`."""
    if not mine or not theirs or cut is None or not complete(mine):
        return None
    late = lateness(mine, place, entered=entered)
    lengths = {seed: float(each["steps"] - late) for seed, each in mine.items()}
    mine_at, theirs_at = (arrivals(each, place, cut, entered=entered) for each in (mine, theirs))
    return ratio(mine_at, theirs_at, lengths)


def ratio_to(study: Study, finished: Mapping[str, Record], cell: Cell, reference: Cell) -> Interval | None:
    """The cell's arrivals over the reference's, at the reference's cut-off."""
    mine, theirs = (final_records(each, finished) for each in (cell, reference))
    return ratio_at(mine, theirs, PLACES[study.metric], cutoff(study, finished, reference))


def result(study: Study, finished: Mapping[str, Record], cell: Cell) -> Result:
    """All that is known of a cell."""
    records, reference = final_records(cell, finished), study.cell(cell.reference or cell.name)
    cut = cutoff(study, finished, reference)
    arrived = {} if cut is None else arrivals(records, PLACES[study.metric], cut)
    known = [steps for steps in arrived.values() if steps is not None]
    return Result(
        cell=cell,
        records=records,
        rate=chosen_rate(cell, finished),
        edge=at_edge(cell, finished),
        loss=last(records, TEST),
        error=last(records, ERROR),
        arrived=statistics.fmean(known) if known and len(known) == len(records) == records.wanted else None,
        ratio=None if cell.reference is None else ratio_to(study, finished, cell, reference),
        beside=None if cell.beside is None else ratio_to(study, finished, cell, study.cell(cell.beside)),
        gap=percent_above(records, final_records(reference, finished)) if cell.reference else None,
    )


def judged(claim: Claim, results: Mapping[str, Result]) -> list[tuple[Result, Interval | None, str]]:
    """Each cell of a claim with its value and how this lies to the bound, the smallest mean first."""
    found = [results[name] for name in claim.cells]
    values = [each.ratio if claim.kind == "ratio" else each.gap for each in found]
    rows = [(each, value, bounded(value, claim.bound)) for each, value in zip(found, values, strict=True)]
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
    # of a rotated cell both are set against the optimizer that is not rotated
    own = found.ratio if found.cell.reference == other.cell.reference else found.beside
    return against(own, other.ratio, SOONER)


def against_reference(found: Result) -> str:
    """Whether the cell is later than its reference: whether the whole interval of the ratio lies above 1."""
    return "" if found.cell.reference is None else against(found.ratio, 1, SOONER)


def by_error(one: Result, other: Result) -> str:
    """Whether one cell has the smaller test error at the end: rule 9, by the difference seed by seed.

    "open" while a seed of either is missing; "undecided" where a seed diverged, as there is no interval then.
    """
    if not (one.complete and other.complete):
        return "open"
    return against(points_above(one.records, other.records), 0, ("better", "worse"), unknown="undecided")


def scaled(value: Interval | None, factor: float) -> Interval | None:
    """An interval of a quantity times a number."""
    return None if value is None else Interval(*(factor * each for each in value))
