"""Learning curves of each method's best configuration: all seeds thin, their mean strong."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import LABELS, ChartSpecs, Layer, color, dash, data, loss_axis
from stretto.report.metric import Metric, own_metrics
from stretto.report.palette import Style
from stretto.report.record import Point, Record
from stretto.report.summary import MethodSummary

MOST_POINTS = 80  # of one line: more cannot be told apart on a screen
SHORT = "format(datum.value, datum.value < 1 ? '~g' : '~s')"  # 0.5, 500, 1k, 1.5k
LOSSES = {"train": "train loss", "validation": "validation loss"}


def section(summaries: Sequence[MethodSummary], styles: Mapping[str, Style], specs: ChartSpecs) -> list[str]:
    """Add all charts of the section to the page; return the ids of their elements."""
    charts = curve_charts(summaries, styles)
    return [element for name, chart in charts.items() if (element := specs.add(f"curve-{name}", chart))]


def configuration_note(summary: MethodSummary) -> str:
    """The configuration whose curves are drawn for a method, and on how many seeds."""
    if not summary.best_configuration:
        return f"{summary.method}: no finished run, so no curve"
    count = len(summary.best_configuration)
    options = summary.best_configuration[0].option_text or "its only configuration"
    return f"{summary.method}: {options} ({count} seed{'s' if count > 1 else ''})"


def curve_charts(
    summaries: Sequence[MethodSummary], styles: Mapping[str, Style], height: int = 230
) -> dict[str, alt.LayerChart]:
    """Train and validation loss, and the user's metrics, each against step, examples and serial compute.

    {the quantity and what it is drawn against: its chart}. They share their data.
    """
    own = own_metrics([record for summary in summaries for record in summary.best_configuration])
    rows = curve_rows(summaries, own)
    if not rows:
        return {}
    scale, unit = units.flop_unit(max(row["serial"] for row in rows))
    for row in rows:
        row["serial"] /= scale
    source = data(rows)
    across = {"step": "step", "examples": "examples", "serial": f"serial compute, {unit}"}
    charts: dict[str, alt.LayerChart] = {}
    hints = {name: name for name in LOSSES} | {own_field(index): metric.name for index, metric in enumerate(own)}
    linear = {own_field(index) for index, metric in enumerate(own) if metric.higher}
    for loss, label in (LOSSES | {own_field(index): metric.direction for index, metric in enumerate(own)}).items():
        values = [row[loss] for row in rows if row[loss] is not None]
        y = alt.Y(f"{loss}:Q", **loss_axis(values, label, linear=loss in linear)) if values else None
        for field, title in across.items():
            if y is not None:
                x = alt.X(
                    f"{field}:Q", title=title, axis=alt.Axis(tickCount=5, labelExpr=SHORT), scale=alt.Scale(nice=False)
                )
                base = Layer(source).encode(x=x, y=y, color=color(styles))
                charts[f"{loss}-{field}"] = _chart(base, dash(styles), height, hints)
    return charts


def own_field(index: int) -> str:
    """The field of a row that has the user's metric of this number, whose name may be no name of a field."""
    return f"own{index}"


def _chart(base: alt.Chart, dashes: alt.StrokeDash, height: int, shown: Mapping[str, str]) -> alt.LayerChart:
    order = alt.Order("step:Q")
    seeds = base.transform_filter("datum.run != 'mean'").mark_line(strokeWidth=1, opacity=0.4)
    mean = base.transform_filter("datum.run == 'mean'").mark_line(strokeWidth=2.4)
    hints = [alt.Tooltip("method:N"), alt.Tooltip("step:Q")]
    hints += [alt.Tooltip(f"{name}:Q", title=title, format=LABELS) for name, title in shown.items()]
    dots = base.transform_filter("datum.run == 'mean'").mark_point(size=60, filled=True, opacity=0)
    layers = (
        seeds.encode(detail=alt.Detail("run:N"), order=order),
        mean.encode(order=order, strokeDash=dashes),
        dots.encode(tooltip=hints),
    )
    return alt.LayerChart(layer=layers, width="container", height=height)


def speed_chart(run: Record, style: Style, height: int = 230) -> alt.LayerChart | None:
    """Examples a second from each evaluation of a run to the next one, against step; None without two of them."""
    rows = [
        {"step": later.step, "speed": (later.examples - point.examples) / (later.seconds - point.seconds)}
        for point, later in pairwise(_thinned(run.points))
        if later.seconds > point.seconds
    ]
    if not rows:
        return None
    axis = alt.Axis(tickCount=5, labelExpr=SHORT)
    x = alt.X("step:Q", title="step", axis=axis, scale=alt.Scale(nice=False))
    y = alt.Y("speed:Q", title="examples a second", axis=axis, scale=alt.Scale(zero=True))
    hints = [alt.Tooltip("step:Q"), alt.Tooltip("speed:Q", title="examples a second", format=",.3s")]
    base = Layer(data(rows)).encode(x=x, y=y)
    layers = [
        base.mark_line(color=style.color, strokeWidth=2.4),
        base.mark_point(size=60, filled=True, opacity=0).encode(tooltip=hints),
    ]
    return alt.LayerChart(layer=layers, width="container", height=height)


def curve_rows(summaries: Sequence[MethodSummary], own: Sequence[Metric] = ()) -> list[dict[str, Any]]:
    """One row for each evaluation of the best configurations' runs, and for the mean over seeds at common steps."""
    rows: list[dict[str, Any]] = []
    for summary in summaries:
        for record in summary.best_configuration:
            rows += [_row(summary.method, record.id, point, own) for point in _thinned(record.points)]
        rows += [_mean(summary.method, points, own) for points in _aligned(summary.best_configuration)]
    logarithmic = not any(row[loss] < 0 for row in rows for loss in LOSSES)
    if logarithmic:  # a loss of exactly 0 has no place on the axis
        rows = [{**row, **{loss: row[loss] or None for loss in LOSSES}} for row in rows]
    return rows


def _row(method: str, run: str, point: Point, own: Sequence[Metric]) -> dict[str, Any]:
    return {
        "method": method,
        "run": run,
        "step": point.step,
        "examples": point.examples,
        "serial": point.serial_flops,
        "train": point.train_loss,
        "validation": point.validation_loss,
        **{own_field(index): metric.at(point) for index, metric in enumerate(own)},
    }


def _mean(method: str, points: Sequence[Point], own: Sequence[Metric]) -> dict[str, Any]:
    row = _row(method, "mean", points[0], own)
    for index, metric in enumerate(own):
        values = [value for point in points if (value := metric.at(point)) is not None]
        row[own_field(index)] = fmean(values) if len(values) == len(points) else None
    averages = {
        "serial": fmean(point.serial_flops for point in points),
        "train": fmean(point.train_loss for point in points),
        "validation": fmean(point.validation_loss for point in points),
    }
    return {**row, **averages}


def _aligned(records: Sequence[Record]) -> list[tuple[Point, ...]]:
    """The evaluations at steps that all seeds have; one that failed has no part in it, or would end the mean early."""
    runs = [_thinned(record.points) for record in records if not record.failed]
    by_step = [{point.step: point for point in points} for points in runs]
    common = [step for step in (by_step[0] if by_step else ()) if all(step in points for points in by_step)]
    return [tuple(points[step] for points in by_step) for step in common]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Evenly spaced evaluations, first and last among them."""
    if len(points) <= MOST_POINTS:
        return points
    stride = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(index * stride)] for index in range(MOST_POINTS)]
