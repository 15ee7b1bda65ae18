"""Delay and what it does to weights: how old, how far apart, how well predicted, stage by stage."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts.axis import log_axis
from stretto.report.charts.rows import color, dash, data, shape
from stretto.report.observed import Observed
from stretto.report.palette import NEUTRAL, Style

HEIGHT = 250
MOST_SYMBOLS = 40  # on a line: more stages than that get a line only
Rows = list[dict[str, Any]]


def delay_chart(delays: Mapping[tuple[int, ...], Sequence[str]], styles: Mapping[str, Style]) -> alt.LayerChart:
    """One line for all methods with the same delays, in the style of the first of them."""
    rows = [
        {"method": methods[0], "methods": ", ".join(methods), "stage": stage, "value": delay}
        for steady, methods in delays.items()
        for stage, delay in enumerate(steady)
    ]
    y = alt.Y("value:Q", title="delay, updates", axis=alt.Axis(tickMinStep=1, format="d"))
    hints = [alt.Tooltip("methods:N"), alt.Tooltip("stage:Q"), alt.Tooltip("value:Q", title="delay")]
    return _lines(rows, stage_axis(max(map(len, delays))), y, styles, hints)


def mismatch_chart(seen: Sequence[Observed], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Mismatch over the steps of a run; none where nobody has any, or was observed more than once."""
    rows = [
        {"method": each.method, "step": step, "value": value, "text": units.number(value)}
        for each in seen
        for step, value in each.over_steps
        if value
    ]
    if not any(len(each.over_steps) > 1 for each in seen):
        return None
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickCount=5), scale=alt.Scale(nice=False, padding=8))
    return _logarithmic(rows, x, "mismatch, mean over stages", styles, ("method", "step", "text"))


def mismatch_by_stage_chart(seen: Sequence[Observed], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Mismatch of every stage at the end of a run; a stage without any has no point."""
    rows = [row for each in seen for row in _by_stage(each.method, each.mismatch)]
    return _logarithmic(rows, stage_axis(_count(seen)), "mismatch at the end", styles, ("method", "stage", "text"))


def prediction_chart(seen: Sequence[Observed], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The error of predicted weights, and dotted that of the weights as they stood when the prediction was made."""
    predicted = [row for each in seen for row in _by_stage(each.method, each.prediction_error)]
    without = [row for each in seen for row in _by_stage(each.method, each.unpredicted_error)]
    rows = [{**row, "what": "predicted"} for row in predicted] + [{**row, "what": "not"} for row in without]
    if not predicted:
        return None
    y = alt.Y("value:Q", **log_axis([row["value"] for row in rows], "error at the end"))
    base = alt.Chart(data(rows)).encode(x=stage_axis(_count(seen)), y=y, color=color(styles))
    hints = _hints(("method", "stage", "text"))
    with_it, without_it = (base.transform_filter(f"datum.what == '{what}'") for what in ("predicted", "not"))
    layers = [
        without_it.mark_line(strokeWidth=1.4, strokeDash=[2, 4], opacity=0.8),
        without_it.mark_point(filled=False, size=46, opacity=0.8).encode(shape=shape(styles), tooltip=hints),
        with_it.mark_line(strokeWidth=2),
        with_it.mark_point(filled=True, size=62, opacity=1).encode(shape=shape(styles), tooltip=hints),
    ]
    return alt.LayerChart(layer=layers).properties(width="container", height=HEIGHT)


def gain_chart(seen: Sequence[Observed], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The error with prediction over the error without; below 1 prediction helps."""
    rows = [row for each in seen for row in _by_stage(each.method, each.gain)]
    even = alt.Chart(data([{"value": 1}])).mark_rule(strokeDash=[4, 4], color=NEUTRAL).encode(y="value:Q")
    x, hints = stage_axis(_count(seen)), ("method", "stage", "text")
    return _logarithmic(rows, x, "error / error without prediction", styles, hints, beneath=[even], also=[1])


def stage_axis(count: int) -> alt.X:
    """The axis of so many stages."""
    axis = alt.Axis(values=list(range(0, count, 1 + count // 16)), format="d", grid=False)
    scale = alt.Scale(domain=[0, max(count - 1, 1)], nice=False, padding=10)
    return alt.X("stage:Q", title="stage", axis=axis, scale=scale)


def _count(seen: Sequence[Observed]) -> int:
    return max((len(each.mismatch) for each in seen), default=0)


def _by_stage(method: str, values: Iterable[float | None]) -> Rows:
    """One row a stage, but for those where there is nothing a logarithmic axis could show."""
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
    also: Sequence[float] = (),
) -> alt.LayerChart | None:
    if not rows:
        return None
    y = alt.Y("value:Q", **log_axis([*(row["value"] for row in rows), *also], title))
    return _lines(rows, x, y, styles, _hints(hints), beneath)


def _lines(
    rows: Rows,
    x: alt.X,
    y: alt.Y,
    styles: Mapping[str, Style],
    hints: Sequence[alt.Tooltip],
    beneath: Sequence[alt.Chart] = (),
) -> alt.LayerChart:
    base = alt.Chart(data(rows)).encode(x=x, y=y, color=color(styles))
    crowded = len({row["stage"] for row in rows if "stage" in row}) > MOST_SYMBOLS
    line = base.mark_line(strokeWidth=2).encode(strokeDash=dash(styles))
    dots = base.mark_point(filled=True, size=62, opacity=0 if crowded else 1)
    layers = [*beneath, line, dots.encode(shape=shape(styles), tooltip=list(hints))]
    return alt.LayerChart(layer=layers).properties(width="container", height=HEIGHT)


def _hints(fields: Sequence[str]) -> list[alt.Tooltip]:
    names = {"text": "value"}
    return [alt.Tooltip(f"{field}:N", title=names.get(field, field)) for field in fields]
