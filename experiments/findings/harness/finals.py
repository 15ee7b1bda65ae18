"""Quantities of finished cells for the sections of a study's own, formed seed by seed, and their verdicts in words."""

import statistics
from collections.abc import Iterable, Mapping

from harness.cells import SEEDS, Cell, Record
from harness.halving import final_records
from harness.intervals import Interval, arrival, compared, interval, ratio, value_at
from harness.results import curve

Records = Mapping[int, Record]
"""The runs of rung 2 of a cell, by seed."""


def finals(cells: Iterable[Cell], finished: Mapping[str, Record]) -> dict[str, Records]:
    """Rung 2 of each cell whose seeds are all there, by the cell's name."""
    found = {cell.name: final_records(cell, finished) for cell in cells}
    return {name: records for name, records in found.items() if len(records) == len(SEEDS)}


def sound(*cells: Records | None) -> bool:
    """Whether all of them are there and no seed of any diverged."""
    return not any(records is None or any(each["diverged"] for each in records.values()) for records in cells)


def last(records: Records | None, place: int) -> Interval | None:
    """What a cell has at the end; None while it is not known or where a seed diverged."""
    if records is None or not sound(records):
        return None
    return interval([curve(records[seed], place)[-1][1] for seed in SEEDS])


def last_difference(mine: Records | None, theirs: Records | None, place: int) -> Interval | None:
    """What a cell has at its end minus what the other one has at that step, seed by seed."""
    if mine is None or theirs is None or not sound(mine, theirs):
        return None
    ends = {seed: curve(mine[seed], place)[-1] for seed in SEEDS}
    return interval([value - value_at(curve(theirs[seed], place), step) for seed, (step, value) in ends.items()])


def cut_at(records: Records | None, place: int, share: float) -> float | None:
    """The mean over seeds of what a reference has at this share of its steps; None while that is not known."""
    if records is None or not sound(records):
        return None
    return statistics.fmean(value_at(curve(each, place), share * each["steps"]) for each in records.values())


def ratio_at(mine: Records | None, theirs: Records | None, place: int, cut: float | None) -> Interval | None:
    """Steps to a cut-off over those of the other cell, seed by seed."""
    if mine is None or theirs is None or cut is None:
        return None
    one, other = (
        {seed: arrival(curve(each, place), cut) for seed, each in records.items()} for records in (mine, theirs)
    )
    return ratio(one, other, {seed: float(each["steps"]) for seed, each in mine.items()})


def scaled(value: Interval | None, factor: float) -> Interval | None:
    """An interval of a quantity times a number."""
    return None if value is None else Interval(*(factor * each for each in value))


def against(value: Interval | None, other: Interval | float | None, words: tuple[str, str]) -> str:
    """The first word where the value is less than the other one, the second where it is more; else "undecided".

    "open" while one of them is not known.
    """
    if isinstance(other, int | float):
        other = Interval(other, other, other)
    if value is None or other is None:
        return "open"
    return {"less": words[0], "more": words[1], "undecided": "undecided"}[compared(value, other)]


def shown(value: Interval | None) -> str:
    """The interval in words; nothing while it is not known."""
    return "" if value is None else str(value)
