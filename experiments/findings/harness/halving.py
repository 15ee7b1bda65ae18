"""Successive halving: all rates of a cell for some of its steps with one seed, then the best one with all seeds."""

import math
from collections.abc import Mapping

import stretto
from harness.cells import LATER, MOST_RUNS, Cell, Record, Run, Study, key_of

MOST_EXTENSIONS = 2  # rates that may be added to a cell's grid


def rung_run(cell: Cell, rate: float) -> Run:
    """The run of the first rung at this rate."""
    return Run(cell, rate, cell.seeds[0], cell.rung)


def value(record: Record) -> float:
    """By what rates are chosen: the validation loss at the end; infinite for a run that diverged."""
    found = record["validation"]
    return math.inf if found is None or not math.isfinite(found) else float(found)


def grid(cell: Cell, finished: Mapping[str, Record]) -> tuple[float, ...]:
    """The cell's rates, with those that extend the grid where its best rate lies at the edge.

    None is added while a rate of the grid so far is not finished.
    """
    rates = cell.rates
    for _ in range(0 if cell.is_fixed else MOST_EXTENSIONS):
        best = best_of(cell, rates, finished)
        beside = {rates[0]: rates[1], rates[-1]: rates[-2]}  # of the edges
        if best not in beside:
            break
        rates = tuple(sorted((*rates, float(f"{best * best / beside[best]:.6g}"))))
    return rates


def best_of(cell: Cell, rates: tuple[float, ...], finished: Mapping[str, Record]) -> float | None:
    """The rate with the smallest validation loss in rung 1, the smallest rate of several; None while one is missing."""
    if cell.is_fixed:
        return cell.rates[0]
    records = [finished.get(rung_run(cell, rate).key) for rate in rates]
    known = [record for record in records if record is not None]
    if len(known) < len(rates):
        return None
    return min(zip(map(value, known), rates, strict=True))[1]


def used_rates(cell: Cell, finished: Mapping[str, Record]) -> tuple[float, ...]:
    """The rates of rung 1 that have been run, and those of the grid that are missing."""
    if cell.is_fixed:
        return cell.rates
    rates, extra = set(cell.rates), grid(cell, finished)
    return tuple(sorted(rates | {rate for rate in extra if rung_run(cell, rate).key in finished}))


def chosen_rate(cell: Cell, finished: Mapping[str, Record]) -> float | None:
    """The best rate among those that were run; None while rung 1 is not finished."""
    return best_of(cell, used_rates(cell, finished), finished)


def at_edge(cell: Cell, finished: Mapping[str, Record]) -> bool:
    """Whether the best rate still lies at the edge of the grid as it was extended."""
    rates, best = used_rates(cell, finished), chosen_rate(cell, finished)
    return best is not None and not cell.is_fixed and best in (rates[0], rates[-1])


def extensions(study: Study, finished: Mapping[str, Record]) -> int:
    """How many finished runs extended a grid."""
    return sum(len(used_rates(cell, finished)) - len(cell.rates) for cell in study.cells)


def next_runs(study: Study, finished: Mapping[str, Record]) -> list[Run]:
    """The runs that can be made now, in the order of the cells: what a cell lacks of rung 1, or else of rung 2.

    An extension that no longer fits into the study's runs is left out. Fourth and further seeds come after all others,
    and those runs last that a rule named later.
    """
    spare = MOST_RUNS - study.base_runs - extensions(study, finished)
    wanted = []
    for cell in study.cells:
        missing = [] if cell.is_fixed else [rung_run(cell, rate) for rate in grid(cell, finished)]
        missing = [run for run in missing if run.key not in finished]
        if missing and all(run.rate not in cell.rates for run in missing):
            missing, spare = missing[: max(spare, 0)], spare - len(missing[: max(spare, 0)])
        rate = None if missing else chosen_rate(cell, finished)
        seeds = [] if rate is None else [Run(cell, rate, seed, cell.steps) for seed in cell.seeds]
        wanted += missing or [run for run in seeds if run.key not in finished]
    wanted.sort(key=lambda run: run.seed >= LATER)
    return wanted + [run for run in study.added_runs if run.key not in finished]


class Finals(dict[int, Record]):
    """Rung 2 of a cell so far, by seed; `wanted` is how many seeds it has in all.

    `behind` is how many updates its slowest stage has made less than minibatches have entered, `late` how many more
    have entered than training losses are told of (rule 6).
    """

    def __init__(self, found: Mapping[int, Record], wanted: int, behind: int = 0, late: int = 0) -> None:
        super().__init__(found)
        self.wanted, self.behind, self.late = wanted, behind, late

    @classmethod
    def of(cls, cell: Cell, found: Mapping[int, Record]) -> "Finals":
        """Those of a cell, whose method says how late it is."""
        if not found:
            return cls({}, len(cell.seeds))
        told = next((record["resolved"] for record in found.values() if "resolved" in record), cell.method)
        chosen, stages = stretto.method(told), cell.settings.get("stages", 1)
        behind = chosen.plan(stages)[0].drain if chosen.family == "asynchronous" else 0
        return cls(found, len(cell.seeds), behind, chosen.lag(stages))


def final_records(cell: Cell, finished: Mapping[str, Record]) -> Finals:
    """Rung 2 of a cell so far, by seed."""
    rate = chosen_rate(cell, finished)
    if rate is None:
        return Finals({}, len(cell.seeds))
    keys = {seed: key_of(cell.name, rate, seed, cell.steps) for seed in cell.seeds}
    return Finals.of(cell, {seed: finished[key] for seed, key in keys.items() if key in finished})


def runs_left(study: Study, finished: Mapping[str, Record]) -> list[Run]:
    """All runs that are still to come if no further grid is extended; those of rung 2 at a middle rate until chosen."""
    left = []
    for cell in study.cells:
        rung = [] if cell.is_fixed else [rung_run(cell, rate) for rate in cell.rates]
        missing = [run for run in rung if run.key not in finished]
        done = {} if missing else final_records(cell, finished)
        rate = cell.rates[len(cell.rates) // 3]
        left += missing + [Run(cell, rate, seed, cell.steps) for seed in cell.seeds if seed not in done]
    return left + [run for run in study.added_runs if run.key not in finished]
