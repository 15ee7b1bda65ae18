"""Diagnostics of one run: cosines and head losses through training, a line a stage; probes by stage, a line a time."""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts.axis import loss_axis
from stretto.report.charts.delay import stage_axis
from stretto.report.charts.rows import data
from stretto.report.palette import NEUTRAL
from stretto.report.record import Measurement

HEIGHT = 240
FEW = 10  # stages that a legend can name one by one
Rows = list[dict[str, Any]]


def cosine_chart(measured: Sequence[Measurement]) -> alt.LayerChart | None:
    """Cosine of local and backprop gradients against the step; a rule at 1, where both are the same."""
    rows = by_stage(measured, "cosines", lambda value: f"{value:.3f}")
    if not rows:
        return None
    low = min(0.0, *(row["value"] for row in rows))
    y = alt.Y("value:Q", title="cosine to backprop's gradient", scale=alt.Scale(domain=[low, 1.0], nice=True))
    same = alt.Chart(data([{"value": 1.0}])).mark_rule(strokeDash=[4, 4], color=NEUTRAL).encode(y="value:Q")
    return lines(rows, y, same)


def loss_chart(measured: Sequence[Measurement]) -> alt.LayerChart | None:
    """The loss of every head against the step."""
    rows = by_stage(measured, "local_losses", units.number)
    if not rows:
        return None
    return lines(rows, alt.Y("value:Q", **loss_axis([row["value"] for row in rows], "loss of the stage's head")))


def probe_chart(measured: Sequence[Measurement]) -> alt.LayerChart | None:
    """Accuracy of linear probes by stage, a line for each time they were fitted; the last one is strong."""
    rows = by_stage(measured, "probes", units.percent)
    if not rows:
        return None
    last = max(row["step"] for row in rows)
    low = min(row["value"] for row in rows)
    scale = alt.Scale(zero=False, nice=True, domainMin=max(0.0, low - 0.05))
    y = alt.Y("value:Q", title="accuracy of a linear probe", scale=scale, axis=alt.Axis(format=".0%"))
    color = alt.Color("step:O", title="step", scale=alt.Scale(scheme="viridis", reverse=True))
    base = alt.Chart(data(rows)).encode(
        x=stage_axis(1 + max(row["stage"] for row in rows)), y=y, color=color, tooltip=hints()
    )
    width = alt.condition(f"datum.step == {last}", alt.value(2.6), alt.value(1.4))
    drawn = base.mark_line().encode(strokeWidth=width)
    return layered(drawn, base.mark_point(filled=True, size=52, opacity=1))


def by_stage(measured: Sequence[Measurement], field: str, form: Callable[[float], str]) -> Rows:
    """One row a measurement and stage, but for those without a value."""
    return [
        {"step": each.step, "stage": stage, "value": value, "text": form(value)}
        for each in measured
        for stage, value in enumerate(getattr(each, field))
        if value is not None
    ]


def lines(rows: Rows, y: alt.Y, *beneath: alt.Chart) -> alt.LayerChart:
    """Against the step, a line for each stage from dark (the input's side) to light."""
    few = 1 + max(row["stage"] for row in rows) <= FEW
    steps = sorted({row["step"] for row in rows})
    x = alt.X("step:Q", title="step", axis=alt.Axis(values=steps, format="d"), scale=alt.Scale(nice=False, padding=10))
    color = alt.Color(f"stage:{'O' if few else 'Q'}", title="stage", scale=alt.Scale(scheme="viridis"))
    base = alt.Chart(data(rows)).encode(x=x, y=y, color=color, tooltip=hints())
    drawn = base.mark_line(strokeWidth=2).encode(detail="stage:O")
    return layered(*beneath, drawn, base.mark_point(filled=True, size=52, opacity=1))


def hints() -> list[alt.Tooltip]:
    """What is told where the pointer is."""
    return [alt.Tooltip("stage:O"), alt.Tooltip("step:Q"), alt.Tooltip("text:N", title="value")]


def layered(*layers: alt.Chart) -> alt.LayerChart:
    """As wide as its place."""
    return alt.LayerChart(layer=list(layers)).properties(width="container", height=HEIGHT)
