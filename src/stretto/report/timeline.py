"""Timelines: what each worker did in a few turns, above what it would do in a simulation."""

from collections.abc import Collection, Sequence
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.chart_store import ChartSpecs
from stretto.report.encodings import data
from stretto.report.turns import WAIT, Bar, Timelines
from stretto.schedule.action import KINDS
from stretto.schedule.draw import COLORS

LOOKS = {**{kind: (name, COLORS[kind]) for kind, name in KINDS.items()}, WAIT: (WAIT, "#c9ced6")}
ROW_HEIGHT = 26  # pixels from one worker to the next
MARGIN = 76  # pixels for the axis and the legend
LABELLED = 0.028  # of the width: a shorter bar has no room for its name


def section(runs: Sequence[Timelines], specs: ChartSpecs) -> list[dict[str, Any]]:
    """The part of the page on each run: two charts with one scale of time, unless the run was emulated."""
    return [_of_run(run, index, specs) for index, run in enumerate(runs)]


def _of_run(run: Timelines, index: int, specs: ChartSpecs) -> dict[str, Any]:
    windows = {"measured": run.measured, "simulated": run.simulated}
    longest = max(window.seconds for window in windows.values())
    kinds = {bar.kind for window in windows.values() for bar in window.bars}
    charts = {
        name: specs.add(
            f"timeline-{index}-{name}",
            timeline_chart(window.bars, window.workers, window.seconds if run.emulated else longest, kinds),
        )
        for name, window in windows.items()
    }
    return {
        "method": run.method,
        "run": run.run,
        "turns": run.turns,
        "emulated": run.emulated,
        "measured": charts["measured"],
        "simulated": charts["simulated"],
        "measured_turn": units.duration(run.measured.seconds / run.turns),
        "simulated_turn": units.duration(run.period),
        "measured_busy": f"{run.measured.busy:.0%}",
        "simulated_busy": f"{run.simulated.busy:.0%}",
    }


def timeline_chart(bars: Sequence[Bar], workers: int, seconds: float, kinds: Collection[str]) -> alt.LayerChart:
    """A row for each worker, time to the right as far as `seconds`; the legend explains the actions `kinds`."""
    scale, unit = units.time_unit(seconds)
    rows = [
        {
            "worker": f"worker {bar.worker}",
            "kind": LOOKS[bar.kind][0],
            "name": bar.name,
            "from": bar.start / scale,
            "to": bar.end / scale,
            "middle": (bar.start + bar.end) / 2 / scale,
            "label": bar.name if bar.kind != WAIT and bar.end - bar.start > LABELLED * seconds else "",
            "took": units.duration(bar.end - bar.start),
        }
        for bar in bars
    ]
    shown = [look for kind, look in LOOKS.items() if kind in kinds]
    axis = alt.Axis(format=",.4~g", tickCount=8, grid=False)
    x = alt.X("from:Q", title=unit, axis=axis, scale=alt.Scale(domain=[0, seconds / scale], nice=False))
    order = [f"worker {worker}" for worker in range(workers)]
    y = alt.Y(
        "worker:N",
        title=None,
        scale=alt.Scale(domain=order),
        axis=alt.Axis(domain=False, ticks=False, labelPadding=6, minExtent=64),
    )
    legend = alt.Legend(title=None, orient="top", direction="horizontal", symbolType="square")
    colors = alt.Scale(domain=[name for name, _ in shown], range=[color for _, color in shown])
    hints = [alt.Tooltip("name:N", title="what"), alt.Tooltip("kind:N"), alt.Tooltip("took:N"), alt.Tooltip("worker:N")]
    chart = alt.Chart(data(rows))
    spans = chart.mark_bar(height={"band": 0.8}).encode(
        x=x, x2="to:Q", y=y, color=alt.Color("kind:N", scale=colors, legend=legend), tooltip=hints
    )
    names = chart.mark_text(fontSize=10, color="white").encode(x="middle:Q", y=y, text="label:N", tooltip=hints)
    return alt.LayerChart(layer=[spans, names]).properties(width="container", height=ROW_HEIGHT * workers + MARGIN)
