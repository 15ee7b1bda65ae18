"""The part of the page on delay: how stale gradients are, how far weights move meanwhile, how well they are predicted.

Logarithmic axes have no 0, so the text says which methods have none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import ChartSpecs, Layer, color, dash, data, linear_ticks, log_axis, shape, stage_axis
from stretto.report.page import Page
from stretto.report.palette import NEUTRAL, Style
from stretto.report.record import Observation, Record
from stretto.report.summary import MethodSummary

ByStage = tuple[float | None, ...]


@dataclass(frozen=True)
class ObservedMethod:
    """Figures of one method by stage: errors from the last observation of its runs, bytes the most of any."""

    method: str
    over_steps: tuple[tuple[int, float], ...]  # step, mismatch: its mean over stages
    mismatch: ByStage
    prediction_error: ByStage
    unpredicted_error: ByStage
    weight_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]

    @property
    def predicts(self) -> bool:
        """Whether the forward of some stage sees predicted weights."""
        return any(value is not None for value in self.prediction_error)

    @property
    def gain(self) -> ByStage:
        """The error with prediction / the error without, by stage; None where either is missing or 0."""
        pairs = zip(self.prediction_error, self.unpredicted_error, strict=True)
        return tuple(error / unpredicted if error and unpredicted else None for error, unpredicted in pairs)

    @property
    def matches(self) -> bool:
        """Whether every observed backward read exactly the weights that its forward saw."""
        return not any(self.mismatch) and not any(value for _, value in self.over_steps)

    @property
    def stage_bytes(self) -> tuple[float, ...]:
        """Bytes of weights and activations together, by stage."""
        return tuple(sum(both) for both in zip(self.weight_bytes, self.activation_bytes, strict=True))

    @property
    def fullest(self) -> int:
        """The stage that holds the most bytes."""
        return self.stage_bytes.index(max(self.stage_bytes))


def observed_methods(summaries: Sequence[MethodSummary], records: Sequence[Record]) -> tuple[ObservedMethod, ...]:
    """One entry for each observed method, from its best configuration, or from all its runs if every run diverged."""
    methods = []
    for summary in summaries:
        runs = summary.best_configuration or [record for record in records if record.method == summary.method]
        runs = [record for record in runs if record.observations]
        if runs:
            methods.append(_averaged(summary.method, runs))
    return tuple(methods)


def _averaged(method: str, runs: Sequence[Record]) -> ObservedMethod:
    all_observations = [observation for run in runs for observation in run.observations]
    last = [run.observations[-1] for run in runs]
    by_step: dict[int, list[float | None]] = {}
    for observation in all_observations:
        by_step.setdefault(observation.step, []).append(_mean(observation.mismatch))
    averages = [(step, _mean(values)) for step, values in sorted(by_step.items())]
    return ObservedMethod(
        method=method,
        over_steps=tuple((step, value) for step, value in averages if value is not None),
        mismatch=_mean_by_stage(last, lambda observation: observation.mismatch),
        prediction_error=_mean_by_stage(last, lambda observation: observation.prediction_error),
        unpredicted_error=_mean_by_stage(last, lambda observation: observation.unpredicted_error),
        weight_bytes=tuple(map(max, zip(*(seen.weight_bytes for seen in all_observations), strict=True))),
        activation_bytes=tuple(map(max, zip(*(seen.activation_bytes for seen in all_observations), strict=True))),
    )


def _mean_by_stage(observations: Sequence[Observation], figures: Callable[[Observation], ByStage]) -> ByStage:
    return tuple(_mean(values) for values in zip(*map(figures, observations), strict=True))


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


HEIGHT = 250
MOST_SYMBOLS = 40  # on a line: more stages than that get a line only
MEMORY_COLORS = {"weights": "#0072b2", "activations": "#e69f00"}
BAR_HEIGHT = 22  # pixels from one method's bar to the next
MARGIN = 80  # pixels for the axis and the legend
LABEL_WIDTH = 150  # pixels for a method's name
Rows = list[dict[str, Any]]


def section(
    page: Page, summaries: Sequence[MethodSummary], styles: Mapping[str, Style], specs: ChartSpecs
) -> dict[str, Any] | None:
    """The part of the page on delay; None if no method has a delay."""
    delays = {method: steady for method, steady in page.delays.items() if method in styles}
    if not any(any(steady) for steady in delays.values()):
        return None
    observed = observed_methods(summaries, page.records)
    groups = grouped(delays)
    return {
        "delay": specs.add("delay", delay_chart(groups, styles)),
        "groups": [
            {"style": styles[methods[0]], "methods": ", ".join(methods), "delays": delay_text(steady)}
            for steady, methods in groups.items()
        ],
        "mismatch": specs.add("mismatch", mismatch_chart(observed, styles)),
        "mismatch_by_stage": specs.add("mismatch-stage", mismatch_by_stage_chart(observed, styles)),
        "matching": ", ".join(entry.method for entry in observed if entry.matches),
        "prediction": specs.add("prediction", prediction_chart(observed, styles)),
        "gain": specs.add("gain", gain_chart(observed, styles)),
        "memory": [
            specs.add("memory-fullest", memory_chart(observed, "stage that holds most", of_fullest_stage)),
            specs.add("memory-all", memory_chart(observed, "all stages", of_all_stages)),
        ]
        if observed
        else [],
        "held": [memory_cells(entry) for entry in observed],
        "stages": list(range(max((len(entry.weight_bytes) for entry in observed), default=0))),
    }


def grouped(delays: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], list[str]]:
    """{delays by stage: methods that have them}, the largest delays first."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for method, steady in delays.items():
        groups.setdefault(steady, []).append(method)
    return dict(sorted(groups.items(), key=lambda item: -sum(item[0])))


def delay_text(steady: Sequence[int]) -> str:
    """Delays separated by blanks; `none` if all are 0."""
    return " ".join(str(delay) for delay in steady) if any(steady) else "none"


def memory_cells(entry: ObservedMethod) -> dict[str, Any]:
    """A row of the memory table: for each stage its weights and its activations, as text."""
    pairs = zip(entry.weight_bytes, entry.activation_bytes, strict=True)
    return {"method": entry.method, "cells": [list(map(units.bytes_held, pair)) for pair in pairs]}


def delay_chart(delays: Mapping[tuple[int, ...], Sequence[str]], styles: Mapping[str, Style]) -> alt.LayerChart:
    """Delay against stage: one line for all methods with the same delays, in the style of the first of them."""
    rows = [
        {"method": methods[0], "methods": ", ".join(methods), "stage": stage, "value": delay}
        for steady, methods in delays.items()
        for stage, delay in enumerate(steady)
    ]
    ticks = sorted({round(tick) for tick in linear_ticks(0, max(1, *map(max, delays)))})
    y = alt.Y("value:Q", title="delay, updates", axis=alt.Axis(values=ticks, format="d"))
    hints = [alt.Tooltip("methods:N"), alt.Tooltip("stage:Q"), alt.Tooltip("value:Q", title="delay")]
    return _lines(rows, stage_axis(max(map(len, delays))), y, styles, hints)


def mismatch_chart(observed: Sequence[ObservedMethod], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Mismatch against step; None if no method has any, or none was observed more than once."""
    rows = [
        {"method": entry.method, "step": step, "value": value, "text": units.number(value)}
        for entry in observed
        for step, value in entry.over_steps
        if value
    ]
    if not any(len(entry.over_steps) > 1 for entry in observed):
        return None
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickCount=5), scale=alt.Scale(nice=False, padding=8))
    return _logarithmic(rows, x, "mismatch, mean over stages", styles, ("method", "step", "text"))


def mismatch_by_stage_chart(observed: Sequence[ObservedMethod], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Mismatch of every stage at the end of a run; a stage without mismatch has no point."""
    rows = [row for entry in observed for row in _by_stage(entry.method, entry.mismatch)]
    return _logarithmic(
        rows, stage_axis(_num_stages(observed)), "mismatch at the end", styles, ("method", "stage", "text")
    )


def prediction_chart(observed: Sequence[ObservedMethod], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The error of predicted weights; dotted, the error of the weights from which they were predicted."""
    predicted = [row for entry in observed for row in _by_stage(entry.method, entry.prediction_error)]
    current = [row for entry in observed for row in _by_stage(entry.method, entry.unpredicted_error)]
    rows = [{**row, "what": "predicted"} for row in predicted] + [{**row, "what": "current"} for row in current]
    if not predicted:
        return None
    y = alt.Y("value:Q", **log_axis([row["value"] for row in rows], "error at the end"))
    base = Layer(data(rows)).encode(x=stage_axis(_num_stages(observed)), y=y, color=color(styles))
    hints = _hints(("method", "stage", "text"))
    predicted_part, current_part = (
        base.transform_filter(f"datum.what == '{what}'") for what in ("predicted", "current")
    )
    layers = [
        current_part.mark_line(strokeWidth=1.4, strokeDash=[2, 4], opacity=0.8),
        current_part.mark_point(filled=False, size=46, opacity=0.8).encode(shape=shape(styles), tooltip=hints),
        predicted_part.mark_line(strokeWidth=2),
        predicted_part.mark_point(filled=True, size=62, opacity=1).encode(shape=shape(styles), tooltip=hints),
    ]
    return alt.LayerChart(layer=layers, width="container", height=HEIGHT)


def gain_chart(observed: Sequence[ObservedMethod], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The error with prediction / the error without; below 1 prediction helps."""
    rows = [row for entry in observed for row in _by_stage(entry.method, entry.gain)]
    even = Layer(data([{"value": 1}])).mark_rule(strokeDash=[4, 4], color=NEUTRAL).encode(y=alt.Y("value:Q"))
    x, hints = stage_axis(_num_stages(observed)), ("method", "stage", "text")
    return _logarithmic(rows, x, "error / error without prediction", styles, hints, beneath=[even], include=[1])


def _num_stages(observed: Sequence[ObservedMethod]) -> int:
    return max((len(entry.mismatch) for entry in observed), default=0)


def _by_stage(method: str, values: Iterable[float | None]) -> Rows:
    """One row a stage; those without a value, or with 0, are left out: a logarithmic axis has no 0."""
    shown = ((stage, value) for stage, value in enumerate(values) if value)
    return [{"method": method, "stage": s, "value": value, "text": units.number(value)} for s, value in shown]


def _logarithmic(
    rows: Rows,
    x: alt.X,
    title: str,
    styles: Mapping[str, Style],
    hints: Sequence[str],
    *,
    beneath: Sequence[alt.Chart] = (),
    include: Sequence[float] = (),
) -> alt.LayerChart | None:
    if not rows:
        return None
    y = alt.Y("value:Q", **log_axis([*(row["value"] for row in rows), *include], title))
    return _lines(rows, x, y, styles, _hints(hints), beneath)


def _lines(
    rows: Rows,
    x: alt.X,
    y: alt.Y,
    styles: Mapping[str, Style],
    hints: Sequence[alt.Tooltip],
    beneath: Sequence[alt.Chart] = (),
) -> alt.LayerChart:
    base = Layer(data(rows)).encode(x=x, y=y, color=color(styles))
    crowded = len({row["stage"] for row in rows if "stage" in row}) > MOST_SYMBOLS
    line = base.mark_line(strokeWidth=2).encode(strokeDash=dash(styles))
    dots = base.mark_point(filled=True, size=62, opacity=0 if crowded else 1)
    layers = [*beneath, line, dots.encode(shape=shape(styles), tooltip=list(hints))]
    return alt.LayerChart(layer=layers, width="container", height=HEIGHT)


def _hints(fields: Sequence[str]) -> list[alt.Tooltip]:
    names = {"text": "value"}
    return [alt.Tooltip(f"{field}:N", title=names.get(field, field)) for field in fields]


def memory_chart(
    observed: Sequence[ObservedMethod], title: str, total: Callable[[Sequence[float], ObservedMethod], float]
) -> alt.LayerChart:
    """A bar for each method: bytes of weights and activations, each reduced over the stages by `total`."""
    rows = [row for entry in observed for row in memory_rows(entry, total)]
    scale, unit = units.byte_unit(max(row["bytes"] for row in rows))
    for row in rows:
        row["value"] = row["bytes"] / scale
    order = [entry.method for entry in observed]
    x = alt.X("value:Q", title=f"{title}, {unit}", axis=alt.Axis(format=",.6~g", tickCount=5), stack="zero")
    y = alt.Y(
        "method:N",
        sort=order,
        title=None,
        axis=alt.Axis(labelLimit=LABEL_WIDTH, labelPadding=6, domain=False, ticks=False),
    )
    legend = alt.Legend(title=None, orient="top", direction="horizontal", symbolType="square")
    shade = alt.Color(
        "kind:N", scale=alt.Scale(domain=list(MEMORY_COLORS), range=list(MEMORY_COLORS.values())), legend=legend
    )
    hints = [alt.Tooltip("method:N"), alt.Tooltip("kind:N"), alt.Tooltip("text:N", title="held")]
    bars = (
        Layer(data(rows))
        .mark_bar(height={"band": 0.72})
        .encode(x=x, y=y, color=shade, order=alt.Order("rank:Q"), tooltip=hints)
    )
    return alt.LayerChart(layer=[bars], width="container", height=BAR_HEIGHT * len(order) + MARGIN)


def memory_rows(
    entry: ObservedMethod, total: Callable[[Sequence[float], ObservedMethod], float]
) -> list[dict[str, Any]]:
    """Two rows for a method: bytes of weights, then of activations."""
    held = [total(entry.weight_bytes, entry), total(entry.activation_bytes, entry)]
    return [
        {"method": entry.method, "kind": kind, "rank": rank, "bytes": value, "text": units.bytes_held(value)}
        for rank, (kind, value) in enumerate(zip(MEMORY_COLORS, held, strict=True))
    ]


def of_fullest_stage(values: Sequence[float], entry: ObservedMethod) -> float:
    """The value of the stage that holds the most bytes."""
    return values[entry.fullest]


def of_all_stages(values: Sequence[float], _: ObservedMethod) -> float:
    """The sum over all stages."""
    return sum(values)
