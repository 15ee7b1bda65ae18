"""How the result depends on learning rate and batch size: one chart a method, failed runs in a row at the top."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import LABELS, ChartSpecs, Layer, data, linear_ticks, log_axis, log_domain, log_ticks, state
from stretto.report.metric import VALIDATION_ACCURACY, Metric, own_metrics
from stretto.report.palette import Style
from stretto.report.record import Record, methods
from stretto.report.summary import judge

RATE, BATCH = "lr", "batch_size"
SHAPES = ("circle", "diamond", "triangle-up", "square", "cross", "triangle-down")
DASHES = ([1, 0], [6, 3], [2, 3], [8, 3, 2, 3], [10, 3], [1, 4])
HEADROOM = 0.2  # of the length of the axis, kept above the data for failed runs
CROSS_ROW = 14  # pixels from the top to their crosses
LABEL_WIDTH = 48  # pixels left of the plot, wide enough for the words "diverged" and "failed"


def section(records: Sequence[Record], styles: Mapping[str, Style], specs: ChartSpecs) -> list[dict[str, Any]]:
    """The part of the page on tuning, by metric: that by which runs are chosen, then the user's own.

    Each has its label, and each method with the element of its chart.
    """
    by_metric = [(metric, tuning_charts(records, styles, metric)) for metric in (judge(records), *own_metrics(records))]
    return [
        {
            "heading": metric.direction,
            "charts": [
                {"method": method, "place": specs.add(f"tuning-{number}-{index}", chart)}
                for index, (method, chart) in enumerate(charts.items())
            ],
        }
        for number, (metric, charts) in enumerate(by_metric)
        if charts
    ]


def tuning_charts(
    records: Sequence[Record], styles: Mapping[str, Style], metric: Metric | None = None, height: int = 250
) -> dict[str, alt.LayerChart]:
    """{method: its chart}, all on the same axes; empty if no run has a positive learning rate among its options.

    They show the `metric`, that by which runs are chosen unless said otherwise.
    """
    metric = judge(records) if metric is None else metric
    rows = tuning_rows(records, metric)
    if not rows:
        return {}
    batches = sorted({row["batch"] for row in rows})
    rates = sorted({row["rate"] for row in rows})
    channel = log_axis(rates, "learning rate", margin=0.1, most=6)
    if len(rates) <= 8:  # a tick at each rate that was run
        channel["axis"] = alt.Axis(values=rates, format=LABELS)
    x = alt.X("rate:Q", **channel)
    values = [row["value"] for row in rows if row["value"] is not None]
    y = alt.Y("value:Q", **_y_axis(values, metric))
    return {
        method: _chart([row for row in rows if row["method"] == method], batches, x, y, styles[method], height)
        for method in methods(tuple(records))
        if any(row["method"] == method for row in rows)
    }


def tuning_rows(records: Sequence[Record], metric: Metric) -> list[dict[str, Any]]:
    """One row a run; `value` is None for a run that failed."""
    usable = [record for record in records if _number(record.options.get(RATE), positive=True)]
    return [
        {
            "run": record.id,
            "method": record.method,
            "rate": float(record.options[RATE]),
            "batch": record.options[BATCH] if _number(record.options.get(BATCH)) else 0,
            "seed": record.seed,
            "options": record.option_text,
            "value": metric.final(record),
            "state": state(record),
        }
        for record in usable
        if record.failed or metric.final(record) is not None
    ]


def _number(value: object, positive: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 or not positive


def _y_axis(values: Sequence[float], metric: Metric) -> dict[str, Any]:
    """An axis that leaves the top of the plot to the failed runs."""
    if not values:
        return {"scale": alt.Scale(domain=[0, 1]), "axis": None, "title": metric.label}
    if min(values) > 0 and not metric.higher:
        low, high = log_domain(values)
        scale = alt.Scale(type="log", domain=[low, high * (high / low) ** HEADROOM], nice=False)
        axis = alt.Axis(values=log_ticks(low, high), format=LABELS, minExtent=LABEL_WIDTH)
        return {"scale": scale, "axis": axis, "title": metric.label}
    pad = max(0.05 * (max(values) - min(values)), 0.004 * abs(max(values))) or 0.05  # all may be 0
    low, high = min(values) - pad, max(values) + pad
    scale = alt.Scale(domain=[low, high + HEADROOM * (high - low)], nice=False)
    form = ".1~%" if metric is VALIDATION_ACCURACY else LABELS
    axis = alt.Axis(values=linear_ticks(low, high), format=form, minExtent=LABEL_WIDTH)
    return {"scale": scale, "axis": axis, "title": metric.label}


def _chart(
    rows: list[dict[str, Any]], batches: Sequence[int], x: alt.X, y: alt.Y, style: Style, height: int
) -> alt.LayerChart:
    layers: list[alt.Chart] = []
    hints = [alt.Tooltip(f"{field}:N") for field in ("method", "options", "seed", "result", "state")]
    domain = [_name(batch) for batch in batches]
    legend = alt.Legend(orient="bottom", title=None, direction="horizontal") if len(batches) > 1 else None
    shape = alt.Shape("size:N", scale=alt.Scale(domain=domain, range=list(SHAPES[: len(batches)])), legend=legend)
    at_top = alt.YValue(CROSS_ROW)  # type: ignore[no-untyped-call]
    for index, batch in enumerate(batches):
        shown = [_shown(row) for row in rows if row["batch"] == batch]
        offset = 5 * (index - (len(batches) - 1) / 2)
        base = Layer(data(shown)).encode(x=x)
        valued = base.transform_filter("isValid(datum.value)").encode(y=y)
        mean = Layer(data(_means(shown))).mark_line(
            strokeWidth=1.8, color=style.color, strokeDash=DASHES[index % len(DASHES)], xOffset=offset, opacity=0.8
        )
        points = valued.mark_point(filled=True, size=46, opacity=0.75, color=style.color, xOffset=offset)
        crosses = base.transform_filter("!isValid(datum.value)").mark_text(
            text="✕", fontSize=13, fontWeight="bold", color=style.color, xOffset=offset
        )
        layers += [mean.encode(x=x, y=y), points.encode(shape=shape, tooltip=hints)]
        layers.append(crosses.encode(y=at_top, tooltip=hints))
    failed = [row["state"] for row in rows if row["value"] is None]
    if failed:
        word = "diverged" if all(state.startswith("diverged") for state in failed) else "failed"
        label = Layer(data([{}])).mark_text(text=word, align="right", baseline="middle", fontSize=11.5)
        layers.append(label.encode(x=alt.value(-6), y=at_top))
    return alt.LayerChart(layer=layers, width="container", height=height)


def _name(batch: int) -> str:
    return f"batch {batch}" if batch else "all batches"


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "size": _name(row["batch"]), "result": units.number(row["value"])}


def _means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The mean over finished seeds at each learning rate."""
    rates = sorted({row["rate"] for row in rows if row["value"] is not None})
    return [
        {"rate": rate, "value": fmean(r["value"] for r in rows if r["rate"] == rate and r["value"] is not None)}
        for rate in rates
    ]
