"""How much less serial compute than backprop each method needs to a cut-off, and how much more total compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.methods import BASELINE
from stretto.report import units
from stretto.report.metric import Metric
from stretto.report.panel import Arrival, Panel
from stretto.report.record import family

NOT_REACHED = {"head": "not reached", "lines": [], "best": False, "missing": True}  # a cell of a table of cut-offs


@dataclass(frozen=True)
class Speedup:
    """A method's run with the least serial compute to one cut-off, compared with backprop's."""

    method: str
    arrival: Arrival | None  # None: never reached
    serial: float | None  # backprop's serial compute / this one's: above 1 is faster. None: nothing to compare
    total: float | None  # this one's total compute / backprop's, at those same two runs: above 1 is dearer


def baseline(methods: Sequence[str]) -> str | None:
    """Find the method that the others are measured against, if it is among them."""
    return next((method for method in methods if family(method) == BASELINE), None)


def speedups(panel: Panel, methods: Sequence[str]) -> tuple[Speedup, ...]:
    """One entry for each method, in order. Each method's run is the one with the least serial compute."""
    reference_method = baseline(methods)
    reference = panel.fastest(reference_method) if reference_method is not None else None
    return tuple(_against(reference, method, panel.fastest(method)) for method in methods)


def _against(reference: Arrival | None, method: str, arrival: Arrival | None) -> Speedup:
    if reference is None or arrival is None:
        return Speedup(method, arrival, None, None)
    point, plain = arrival.point, reference.point
    if min(point.serial_flops, plain.total_flops) <= 0:  # as good as that before its first update
        return Speedup(method, arrival, None, None)
    return Speedup(method, arrival, plain.serial_flops / point.serial_flops, point.total_flops / plain.total_flops)


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
    point = entry.arrival.point
    costs = [f"{units.flops(point.serial_flops)} serial", f"{units.flops(point.total_flops)} total"]
    costs += ["diverged later"] * entry.arrival.record.diverged
    if is_baseline:
        head, lines = "1×", ["1× the total", *costs]
    elif entry.serial is None:
        head, lines = units.flops(point.serial_flops), ["serial", *costs[1:]]
    else:
        head, lines = units.times(entry.serial), [f"{units.times(entry.total)} the total", *costs]
    return {"head": head, "lines": lines, "best": entry.serial == best is not None, "missing": False}
