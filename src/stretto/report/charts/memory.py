"""What stages hold: weights and activations, stacked, a bar a method."""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts.rows import data
from stretto.report.observed import Observed

KINDS = {"weights": "#0072b2", "activations": "#e69f00"}
BAR = 22  # pixels from one method to the next
ROOM = 80  # pixels for the axis and the legend
LABEL = 150  # pixels for a method's name


def memory_chart(
    seen: Sequence[Observed], title: str, pick: Callable[[Sequence[float], Observed], float]
) -> alt.LayerChart:
    """`pick` says what of the bytes of all stages a bar shows."""
    rows = [row for each in seen for row in memory_rows(each, pick)]
    scale, unit = units.byte_unit(max(row["bytes"] for row in rows))
    for row in rows:
        row["value"] = row["bytes"] / scale
    order = [each.method for each in seen]
    x = alt.X("value:Q", title=f"{title}, {unit}", axis=alt.Axis(format=",.6~g", tickCount=5), stack="zero")
    y = alt.Y(
        "method:N", sort=order, title=None, axis=alt.Axis(labelLimit=LABEL, labelPadding=6, domain=False, ticks=False)
    )
    legend = alt.Legend(title=None, orient="top", direction="horizontal", symbolType="square")
    shade = alt.Color("kind:N", scale=alt.Scale(domain=list(KINDS), range=list(KINDS.values())), legend=legend)
    hints = [alt.Tooltip("method:N"), alt.Tooltip("kind:N"), alt.Tooltip("text:N", title="held")]
    bars = alt.Chart(data(rows)).mark_bar(height={"band": 0.72}).encode(
        x=x, y=y, color=shade, order=alt.Order("rank:Q"), tooltip=hints
    )  # fmt: skip
    return alt.LayerChart(layer=[bars]).properties(width="container", height=BAR * len(order) + ROOM)


def memory_rows(seen: Observed, pick: Callable[[Sequence[float], Observed], float]) -> list[dict[str, Any]]:
    """Weights, then activations."""
    held = [pick(seen.weight_bytes, seen), pick(seen.activation_bytes, seen)]
    return [
        {"method": seen.method, "kind": kind, "rank": rank, "bytes": value, "text": units.bytes_held(value)}
        for rank, (kind, value) in enumerate(zip(KINDS, held, strict=True))
    ]


def fullest(values: Sequence[float], seen: Observed) -> float:
    """Of the stage that holds most in all."""
    return values[seen.fullest]


def together(values: Sequence[float], _: Observed) -> float:
    """Of all stages."""
    return sum(values)
