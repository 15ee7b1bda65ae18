"""Total compute against serial compute at one cut-off: the trade that Laskin, Metz et al. 2020 plot."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.chart_store import ChartSpecs
from stretto.report.cost_axis import log_axis
from stretto.report.encodings import color, data, shape, state, stroke
from stretto.report.metric import Metric
from stretto.report.palette import Style
from stretto.report.panel import Arrival, Panel

PURPOSE = {
    "train_loss": "How soon the network fits its training data.",
    "train_accuracy": "The same, counted in right answers.",
    "validation_loss": "How soon it does well on data it has not seen.",
    "validation_accuracy": "The same, counted in right answers.",
    "validation_bleu": "How close its translations are to the references.",
}
TOOLTIP = (
    ("method", "method"),
    ("options", "options"),
    ("seed", "seed"),
    ("step", "at step"),
    ("train", "train loss"),
    ("validation", "validation loss"),
    ("accuracy", "validation accuracy"),
    ("bleu", "validation BLEU"),
    ("serial_text", "serial compute"),
    ("total_text", "total compute"),
    ("seconds", "seconds by the clock"),
    ("state", "this run"),
)


def section(metric: Metric, panels: Sequence[Panel], styles: Mapping[str, Style], specs: ChartSpecs) -> dict[str, Any]:
    """The part of the page on one metric: a chart for each cut-off, and the methods that do not reach it."""
    return {
        "label": metric.label,
        "purpose": PURPOSE[metric.name],
        "panels": [
            {
                "goal": panel.goal,
                "missing": ", ".join(panel.missing),
                "place": specs.add(f"frontier-{metric.name}-{index}", frontier_chart(panel, styles)),
            }
            for index, panel in enumerate(panels)
        ],
    }


def frontier_chart(panel: Panel, styles: Mapping[str, Style], height: int = 300) -> alt.LayerChart | None:
    """One panel: non-dominated runs strong and joined by steps, dominated ones faint. None if no run gets there."""
    rows = frontier_rows(panel.arrivals)
    if not rows:
        return None
    x_unit = units.flop_unit(max(row["x"] for row in rows))
    y_unit = units.flop_unit(max(row["y"] for row in rows))
    for row in rows:
        row["x"], row["y"] = row["x"] / x_unit[0], row["y"] / y_unit[0]
    x = alt.X("x:Q", **log_axis([row["x"] for row in rows], f"serial compute, {x_unit[1]}"))
    y = alt.Y("y:Q", **log_axis([row["y"] for row in rows], f"total compute, {y_unit[1]}"))
    hints = [alt.Tooltip(f"{field}:N", title=title) for field, title in TOOLTIP if rows[0][field] is not None]
    base = alt.Chart(data(rows)).encode(x=x, y=y, color=color(styles))
    strong = base.transform_filter("datum.frontier")
    faint = base.transform_filter("!datum.frontier").mark_point(filled=True, size=34, opacity=0.28)
    line = strong.mark_line(interpolate="step-after", strokeWidth=2, opacity=0.85).encode(
        detail="method:N", order=alt.Order("x:Q")
    )
    whole = alt.condition("datum.state == 'finished'", alt.value(1), alt.value(0))  # hollow: it diverged later
    dots = strong.mark_point(filled=True, size=90, strokeWidth=1.8, opacity=1).encode(
        fillOpacity=whole, stroke=stroke(styles)
    )
    layers = [faint.encode(shape=shape(styles), tooltip=hints), line, dots.encode(shape=shape(styles), tooltip=hints)]
    return alt.LayerChart(layer=layers).properties(width="container", height=height)


def frontier_rows(arrivals: Sequence[Arrival]) -> list[dict[str, Any]]:
    """One row a run, by rising serial compute. Runs that cost nothing are left out: a logarithmic axis has no 0."""
    shown = [arrival for arrival in arrivals if arrival.point.serial_flops > 0 and arrival.point.total_flops > 0]
    return [_row(arrival) for arrival in sorted(shown, key=lambda arrival: arrival.point.serial_flops)]


def _row(arrival: Arrival) -> dict[str, Any]:
    record, point = arrival.record, arrival.point
    accuracy, bleu = point.validation_accuracy, point.validation_bleu
    return {
        "run": record.id,
        "method": record.method,
        "options": record.option_text or "–",
        "seed": record.seed,
        "step": point.step,
        "train": units.number(point.train_loss),
        "validation": units.number(point.validation_loss),
        "accuracy": None if accuracy is None else units.percent(accuracy),
        "bleu": None if bleu is None else units.bleu(bleu),
        "x": point.serial_flops,
        "y": point.total_flops,
        "serial_text": units.flops(point.serial_flops),
        "total_text": units.flops(point.total_flops),
        "seconds": units.seconds(point.seconds),
        "state": state(record),
        "frontier": not arrival.dominated,
    }
