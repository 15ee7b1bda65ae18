"""Seconds to each cut-off of one metric, from easy to hard: a line for each method."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts.axis import log_axis
from stretto.report.charts.rows import color, dash, data, shape
from stretto.report.clock import Clocked
from stretto.report.palette import Style

ROW_HEIGHT = 52


def clock_chart(found: Mapping[str, Sequence[Clocked]], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """A row for each cut-off, which is named by its key. None if no run needs any time to any of them."""
    rows = clock_rows(found)
    if not rows:
        return None
    x = alt.X("seconds:Q", **log_axis([row["seconds"] for row in rows], "seconds of training, by the clock"))
    y = alt.Y("goal:N", sort=list(found), title=None, axis=alt.Axis(labelLimit=220, grid=True))
    base = alt.Chart(data(rows)).encode(x=x, y=y, color=color(styles))
    line = base.mark_line(strokeWidth=1.6, opacity=0.7).encode(
        detail="method:N", order=alt.Order("place:O"), strokeDash=dash(styles)
    )
    hints = [alt.Tooltip(f"{name}:N") for name in ("method", "goal", "time", "step", "options", "seed")]
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(shape=shape(styles), tooltip=hints)
    return alt.LayerChart(layer=[line, dots]).properties(width="container", height=ROW_HEIGHT * len(found))


def clock_rows(found: Mapping[str, Sequence[Clocked]]) -> list[dict[str, Any]]:
    """One row a method and cut-off that it reaches. What takes no time has no place on a logarithmic axis."""
    return [
        {
            "method": each.method,
            "goal": goal,
            "place": place,
            "seconds": each.arrival.point.seconds,
            "time": units.seconds(each.arrival.point.seconds),
            "step": each.arrival.point.step,
            "options": each.arrival.record.option_text or units.NONE,
            "seed": each.arrival.record.seed,
        }
        for place, (goal, entries) in enumerate(found.items())
        for each in entries
        if each.arrival is not None and each.arrival.point.seconds > 0
    ]
