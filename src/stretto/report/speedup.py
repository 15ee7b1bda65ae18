"""How much less serial compute than backprop each method needs to a cut-off, and how much more total compute."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stretto.methods import BASELINE
from stretto.report import units
from stretto.report.metric import VALIDATION_LOSS, Metric
from stretto.report.panel import Arrival, Panel, panels
from stretto.report.record import Record, family, methods
from stretto.report.summary import judge

Entry = TypeVar("Entry")
NOT_REACHED = {
    "head": "not reached",
    "lines": [],
    "costs": [],
    "best": False,
    "missing": True,
    "later": "",
}  # a cell of a table of cut-offs


@dataclass(frozen=True)
class Speedup:
    """A method's run with the least serial compute to one cut-off, compared with backprop's."""

    method: str
    arrival: Arrival | None  # None: never reached
    serial: float | None  # backprop's serial compute / this one's: above 1 is faster. None: nothing to compare
    total: float | None  # this one's total compute / backprop's, at those same two runs: above 1 is dearer
    by_seed: tuple[tuple[float, float], ...] = ()  # both ratios of each seed with which both methods get there
    seeds: int = 0  # with which both methods were run

    @property
    def spread(self) -> str:
        """The range of the ratio over seeds, in words, or why there is none; empty without a ratio."""
        if self.serial is None:
            return ""
        return spread_over_seeds(self.serial, [ratio for ratio, _ in self.by_seed], self.seeds)

    @property
    def total_spread(self) -> str:
        """The range of `total` over the same seeds, itself among them; empty with fewer than two."""
        if self.total is None or len(self.by_seed) < 2:
            return ""
        return _range([self.total, *(total for _, total in self.by_seed)])


def spread_over_seeds(ratio: float, ratios: Sequence[float], seeds: int) -> str:
    """The range of a ratio over the seeds with which both methods get there, of `seeds` that both have, in words.

    The `ratio` itself is in the range: its two runs may have different seeds, and then it is none of the `ratios`.
    """
    count = len(ratios)
    if seeds < 2:
        return "one seed" if seeds else "no seed in common"
    if count < 2:
        return f"only {count or 'none'} of {seeds} seeds gets there with both".replace("only none", "none")
    return f"{_range([ratio, *ratios])} over {seeds if count == seeds else f'{count} of {seeds}'} seeds"


def best_by_seed(panel: Panel, method: str, cost: Callable[[Arrival], Any]) -> dict[int, Arrival]:
    """A method's arrival with the least cost, by seed."""
    ordered = sorted(panel.of(method), key=cost, reverse=True)
    return {arrival.record.seed: arrival for arrival in ordered}


def _range(ratios: Iterable[float]) -> str:
    values = list(ratios)
    return units.span(min(values), max(values), units.times)


def baseline(methods: Sequence[str]) -> str | None:
    """Find the method that the others are measured against, if it is among them."""
    return next((method for method in methods if family(method) == BASELINE), None)


def beside_baseline(
    panel: Panel,
    methods: Sequence[str],
    best: Callable[[str], Arrival | None],
    cost: Callable[[Arrival], Any],
    against: Callable[[Arrival | None, str, Arrival | None], Entry],
) -> Iterator[tuple[Entry, list[Entry], int]]:
    """For each method: its `best` run `against` the baseline's, the same of each seed, and how many seeds both have."""
    reference = baseline(methods)
    for method in methods:
        if reference is None:
            yield against(None, method, best(method)), [], 0
            continue
        own, plain = (best_by_seed(panel, name, cost) for name in (method, reference))
        pairs = [against(plain[seed], method, own[seed]) for seed in sorted(own.keys() & plain.keys())]
        seeds = len(panel.seeds_of(method) & panel.seeds_of(reference))
        yield against(best(reference), method, best(method)), pairs, seeds


def speedups(panel: Panel, methods: Sequence[str]) -> tuple[Speedup, ...]:
    """One entry for each method, in order. Each method's run is the one with the least serial compute."""
    compared = beside_baseline(panel, methods, panel.fastest, lambda arrival: arrival.at.cost, _against)
    return tuple(
        replace(
            entry,
            by_seed=tuple((p.serial, p.total) for p in pairs if p.serial is not None and p.total is not None),
            seeds=seeds,
        )
        for entry, pairs, seeds in compared
    )


def _against(reference: Arrival | None, method: str, arrival: Arrival | None) -> Speedup:
    if reference is None or arrival is None:
        return Speedup(method, arrival, None, None)
    point, plain = arrival.at, reference.at
    if min(point.serial_flops, plain.total_flops) <= 0:  # as good as that before its first update
        return Speedup(method, arrival, None, None)
    return Speedup(method, arrival, plain.serial_flops / point.serial_flops, point.total_flops / plain.total_flops)


def fastest_rival(panel: Panel, methods: Sequence[str]) -> Speedup | None:
    """The method with the largest speedup over the baseline; None if nothing can be compared."""
    compared = [entry for entry in speedups(panel, methods) if entry.method != baseline(methods) and entry.serial]
    return max(compared, key=lambda entry: entry.serial or 0.0, default=None)


def is_sure(panel: Panel, method: str) -> bool:
    """Whether a method reaches the cut-off with all of its seeds, in runs that did not fail later."""
    fastest = best_by_seed(panel, method, lambda arrival: arrival.at.cost)
    return fastest.keys() == panel.seeds_of(method) and not any(arrival.lost_later for arrival in fastest.values())


def is_clean(panel: Panel, methods: Sequence[str]) -> bool:
    """Whether both methods that are compared here are sure: the fastest and the baseline, without one the next."""
    reference = baseline(methods)
    if reference is None:
        costs = {method: arrival.at.cost for method in methods if (arrival := panel.fastest(method))}
        compared = sorted(costs, key=lambda method: costs[method])[:2]
    else:
        rival = fastest_rival(panel, methods)
        compared = [] if rival is None else [reference, rival.method]
    return len(compared) == min(2, len(methods)) and all(is_sure(panel, method) for method in compared)


def leading(panels: Sequence[Panel], methods: Sequence[str]) -> Panel:
    """The cut-off that leads the verdict, the first chart and the terminal's table, of several from easy to hard.

    It is the strictest clean one. Where none is clean, it is the one that most methods reach, of several the strictest.
    """
    clean = [panel for panel in panels if is_clean(panel, methods)]
    return clean[-1] if clean else min(reversed(panels), key=lambda panel: len(panel.missing))


def first_panel(records: Sequence[Record]) -> Panel | None:
    """The leading cut-off of a study; None if no run got better than it began.

    It is one of the metric by which runs are chosen, or of validation loss where that has none.
    """
    for metric in dict.fromkeys((judge(records), VALIDATION_LOSS)):
        if found := panels(records, metric):
            return leading(found, methods(tuple(records)))
    return None


def section(metric: Metric, panels: Sequence[Panel], methods: Sequence[str]) -> dict[str, Any]:
    """The table of the page on one metric: a row for each cut-off, a cell for each method."""
    rows = []
    for panel in panels:
        entries = speedups(panel, methods)
        best = max((entry.serial for entry in entries if entry.serial is not None), default=None)
        cells = [_cell(entry, best, entry.method == baseline(methods)) for entry in entries]
        rows.append({"goal": panel.goal, "cells": cells})
    return {"label": metric.label, "rows": rows}


def _cell(entry: Speedup, best: float | None, is_baseline: bool) -> dict[str, Any]:
    if entry.arrival is None:
        return NOT_REACHED
    point = entry.arrival.at
    costs = [f"{units.flops(point.serial_flops)} serial", f"{units.flops(point.total_flops)} total"]
    if is_baseline:
        head, lines = "1×", ["1× the total"]
    elif entry.serial is None:
        head, lines, costs = units.flops(point.serial_flops), ["serial"], costs[1:]
    else:
        head, lines, costs = (
            units.times(entry.serial),
            [entry.spread],
            [f"{units.times(entry.total)} the total", *costs],
        )
    is_best, later = entry.serial == best is not None, entry.arrival.lost_later
    return {"head": head, "lines": lines, "costs": costs, "best": is_best, "missing": False, "later": later}
