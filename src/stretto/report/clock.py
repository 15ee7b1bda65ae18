"""Training time to each cut-off by the clock, for studies whose workers were processes of their own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import ChartSpecs, Layer, color, dash, data, log_axis, shape
from stretto.report.metric import Metric
from stretto.report.palette import Style
from stretto.report.panel import Arrival, Panel
from stretto.report.speedup import NOT_REACHED, baseline, beside_baseline, spread_over_seeds

ROW_HEIGHT = 52  # pixels of a cut-off


@dataclass(frozen=True)
class ClockTime:
    """The run of a method that took the fewest seconds to one cut-off, compared with backprop's."""

    method: str
    arrival: Arrival | None  # None: never reached
    times: float | None  # backprop's seconds / this run's: above 1 is sooner. None: nothing to compare
    by_seed: tuple[float, ...] = ()  # the same of each seed with which both methods get there
    seeds: int = 0  # with which both methods were run

    @property
    def spread(self) -> str:
        """The range of the ratio over seeds, in words, or why there is none; empty without a ratio."""
        return "" if self.times is None else spread_over_seeds(self.times, self.by_seed, self.seeds)


def clock_times(panel: Panel, methods: Sequence[str]) -> tuple[ClockTime, ...]:
    """One entry for each method, in order."""
    compared = beside_baseline(panel, methods, panel.soonest, lambda arrival: arrival.at.seconds, _against)
    return tuple(
        replace(entry, by_seed=tuple(each.times for each in pairs if each.times is not None), seeds=seeds)
        for entry, pairs, seeds in compared
    )


def _against(reference: Arrival | None, method: str, arrival: Arrival | None) -> ClockTime:
    if reference is None or arrival is None or arrival.at.seconds <= 0:  # as good as that before its first step
        return ClockTime(method, arrival, None)
    return ClockTime(method, arrival, reference.at.seconds / arrival.at.seconds)


def section(
    metric: Metric, panels: Sequence[Panel], methods: Sequence[str], styles: Mapping[str, Style], specs: ChartSpecs
) -> dict[str, Any]:
    """The part of the page on one metric: a table row for each cut-off, and their chart."""
    by_goal = {panel.goal: clock_times(panel, methods) for panel in panels}
    rows = []
    for goal, entries in by_goal.items():
        soonest = min((entry.arrival.at.seconds for entry in entries if entry.arrival is not None), default=None)
        rows.append(
            {"goal": goal, "cells": [_cell(entry, soonest, entry.method == baseline(methods)) for entry in entries]}
        )
    return {
        "label": metric.label,
        "heading": metric.heading,
        "rows": rows,
        "place": specs.add(f"clock-{metric.name}", clock_chart(by_goal, styles, metric.label)),
    }


def _cell(entry: ClockTime, soonest: float | None, is_baseline: bool) -> dict[str, Any]:
    if entry.arrival is None:
        return NOT_REACHED
    point = entry.arrival.at
    ratio = [] if entry.times is None else [f"{units.times(entry.times)} as soon"]
    spread = [] if is_baseline or not entry.spread else [entry.spread]
    later = entry.arrival.lost_later
    return {
        "head": units.seconds(point.seconds),
        "lines": [*ratio, *spread],
        "costs": [f"step {units.number(point.step)}"],
        "best": point.seconds == soonest,
        "missing": False,
        "later": later,
    }


def clock_chart(
    by_goal: Mapping[str, Sequence[ClockTime]], styles: Mapping[str, Style], label: str = ""
) -> alt.LayerChart | None:
    """A row for each cut-off, a line for each method; None if no run needs any time to any cut-off.

    `label` is the metric's, which rows need not repeat: the chart stands below it.
    """
    rows = clock_rows(by_goal)
    if not rows:
        return None
    x = alt.X("seconds:Q", **log_axis([row["seconds"] for row in rows], "seconds of training, by the clock"))
    shown = f"replace(datum.label, {json.dumps(label + ' ')}, '')"
    y = alt.Y("goal:N", sort=list(by_goal), title=None, axis=alt.Axis(labelExpr=shown, grid=True))
    base = Layer(data(rows)).encode(x=x, y=y, color=color(styles))
    line = base.mark_line(strokeWidth=1.6, opacity=0.7).encode(
        detail=alt.Detail("method:N"), order=alt.Order("place:O"), strokeDash=dash(styles)
    )
    hints = [alt.Tooltip(f"{name}:N") for name in ("method", "goal", "time", "step", "options", "seed")]
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(shape=shape(styles), tooltip=hints)
    return alt.LayerChart(layer=[line, dots], width="container", height=ROW_HEIGHT * len(by_goal))


def clock_rows(by_goal: Mapping[str, Sequence[ClockTime]]) -> list[dict[str, Any]]:
    """One row for each method and cut-off that it reaches in more than 0 seconds: a logarithmic axis has no 0."""
    return [
        {
            "method": entry.method,
            "goal": goal,
            "place": place,
            "seconds": arrival.at.seconds,
            "time": units.seconds(arrival.at.seconds),
            "step": units.number(arrival.at.step),
            "options": arrival.record.option_text or units.NONE,
            "seed": arrival.record.seed,
        }
        for place, (goal, entries) in enumerate(by_goal.items())
        for entry in entries
        if (arrival := entry.arrival) is not None and arrival.at.seconds > 0
    ]
