"""Timelines: what each worker did in a few turns, above what it would do in a simulation."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import ChartSpecs, Layer, data
from stretto.report.recorded_run import WAIT, Band, Bar, Timelines, TurnWindow
from stretto.schedule.action import KINDS
from stretto.schedule.draw import COLORS
from stretto.tracing.run_phases import DRAIN, RAMP, STEADY, action_named

LOOKS = {**{kind: (name, COLORS[kind]) for kind, name in KINDS.items()}, WAIT: (WAIT, "#c9ced6")}
ENGINE = "autograd::engine::evaluate_function: "  # before the name of each node of a backward
Inside = Mapping[tuple[str, int], str]  # by kind and stage of an action
ROW_HEIGHT = 26  # pixels from one worker to the next
MARGIN = 76  # pixels for the axis and the legend
LEGEND_COLUMNS, LEGEND_ROW = 3, 16  # actions in a row of the legend, which a narrow window has room for; its pixels
LABELLED = 0.028  # of the width: a shorter bar has no room for its name
LETTER = 6.8  # pixels of a letter
NAMED = 0.05  # the same for a phase
PHASE = "phase"  # the row of their names
SHADES = {RAMP: "#e69f00", STEADY: "#56b4e9", DRAIN: "#cc79a7"}  # on light and on dark ground


def section(runs: Sequence[Timelines], specs: ChartSpecs) -> list[dict[str, Any]]:
    """The part of the page on each run: pairs of charts with one scale of time, unless the run was emulated."""
    return [_of_run(run, index, specs) for index, run in enumerate(runs)]


def _of_run(run: Timelines, index: int, specs: ChartSpecs) -> dict[str, Any]:
    inside = {
        key: ", ".join(f"{name.removeprefix(ENGINE)} {units.duration(took)}" for name, took in operations.items())
        for key, operations in run.operations.items()
    }
    return {
        "method": run.method,
        "run": run.run,
        "turns": run.turns,
        "steps": run.steps,
        "shares": [
            {"phase": name, "measured": units.part(*measured), "simulated": units.part(*simulated)}
            for name, (measured, simulated) in run.shares.items()
        ],
        "emulated": run.emulated,
        "profiled": bool(inside),
        "main": _pair(run.measured, run.simulated, f"timeline-{index}", specs, inside, emulated=run.emulated),
        "parts": [
            {"title": part.title}
            | _pair(part.measured, part.simulated, f"timeline-{index}-{at}", specs, inside, emulated=run.emulated)
            for at, part in enumerate(run.parts)
        ],
        "measured_turn": units.duration(run.measured.seconds / run.turns),
        "simulated_turn": units.duration(run.simulated.seconds / run.turns if run.period is None else run.period),
    }


def _pair(
    measured: TurnWindow, simulated: TurnWindow, place: str, specs: ChartSpecs, inside: Inside, *, emulated: bool
) -> dict[str, dict[str, str | None]]:
    """The charts of the same turns, measured and simulated: where each is, and its figures in words."""
    both = {"measured": measured, "simulated": simulated}
    longest = max(window.seconds for window in both.values())
    kinds = {bar.kind for window in both.values() for bar in window.bars}
    return {
        name: {
            "place": specs.add(
                f"{place}-{name}",
                timeline_chart(
                    window.bars, window.workers, window.seconds if emulated else longest, kinds, window.bands, inside
                ),
            ),
            "busy": f"{window.busy:.0%}",
            "phases": ", ".join(f"{phase} {units.duration(took)}" for phase, took in seconds_of(window.bands).items()),
        }
        for name, window in both.items()
    }


def seconds_of(bands: Sequence[Band]) -> dict[str, float]:
    """{phase: seconds}, sums over steps where each has phases of its own."""
    sums: dict[str, float] = {}
    for band in bands:
        sums[band.name] = sums.get(band.name, 0.0) + band.end - band.start
    return sums


def timeline_chart(
    bars: Sequence[Bar],
    workers: int,
    seconds: float,
    kinds: Collection[str],
    bands: Sequence[Band] = (),
    inside: Inside = MappingProxyType({}),
) -> alt.LayerChart:
    """A row for each worker, time to the right as far as `seconds`; the legend explains the actions `kinds`.

    `bands` are phases of the run: shaded over all rows, with their names in a row of their own. `inside` says for the
    kind and stage of an action what its longest operations are.
    """
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
        | ({"inside": inside.get(kind_and_stage(bar), units.NONE)} if inside else {})
        for bar in bars
    ]
    shown = [look for kind, look in LOOKS.items() if kind in kinds]
    axis = alt.Axis(format=",.4~g", tickCount=8, grid=False)
    x = alt.X("from:Q", title=unit, axis=axis, scale=alt.Scale(domain=[0, seconds / scale], nice=False))
    order = [PHASE] * bool(bands) + [f"worker {worker}" for worker in range(workers)]
    y = alt.Y(
        "worker:N",
        title=None,
        scale=alt.Scale(domain=order),
        axis=alt.Axis(domain=False, ticks=False, labelPadding=6, minExtent=64),
    )
    columns = min(len(shown), LEGEND_COLUMNS)
    legend = alt.Legend(title=None, orient="top", direction="horizontal", symbolType="square", columns=columns)
    colors = alt.Scale(domain=[name for name, _ in shown], range=[color for _, color in shown])
    hints = [alt.Tooltip("name:N", title="what"), alt.Tooltip("kind:N"), alt.Tooltip("took:N"), alt.Tooltip("worker:N")]
    if inside:
        hints.append(alt.Tooltip("inside:N"))
    chart = Layer(data(rows))
    spans = chart.mark_bar(height={"band": 0.8}).encode(
        x=x, x2=alt.X2("to:Q"), y=y, color=alt.Color("kind:N", scale=colors, legend=legend), tooltip=hints
    )
    names = chart.mark_text(fontSize=10, color="white").encode(
        x=alt.X("middle:Q"), y=y, text=alt.Text("label:N"), opacity=fits(seconds / scale), tooltip=hints
    )
    shades, labels = band_layers(bands, scale, seconds) if bands else ([], [])
    layers = [*shades, spans, names, *labels]
    margin = MARGIN + LEGEND_ROW * ((len(shown) - 1) // LEGEND_COLUMNS)
    return alt.LayerChart(layer=layers, width="container", height=ROW_HEIGHT * len(order) + margin)


def fits(length: float) -> alt.OpacityValue:
    """Text is seen where its bar is wider than it; the chart, which grows with its window, shows this `length`."""
    room = f"(datum.to - datum.from) * width > {LETTER * length:.6g} * length(datum.label)"
    return alt.OpacityValue(0, condition={"test": room, "value": 1})


def kind_and_stage(bar: Bar) -> tuple[str, int]:
    """Of the action that a bar shows; no action has those of a wait."""
    action = None if bar.kind == WAIT else action_named(bar.name)
    return (WAIT, 0) if action is None else (action.kind, action.stage)


def band_layers(bands: Sequence[Band], scale: float, seconds: float) -> tuple[list[alt.Chart], list[alt.Chart]]:
    """The shades of phases, below the bars, and their names, above them."""
    rows = [
        {
            "phase": band.name,
            "from": band.start / scale,
            "to": band.end / scale,
            "middle": (band.start + band.end) / 2 / scale,
            "label": band.name if band.end - band.start > NAMED * seconds else "",
            "took": units.duration(band.end - band.start),
            "worker": PHASE,
        }
        for band in bands
    ]
    chart = Layer(data(rows))
    hints = [alt.Tooltip("phase:N"), alt.Tooltip("took:N")]
    shade = alt.Color("phase:N", scale=alt.Scale(domain=list(SHADES), range=list(SHADES.values())), legend=None)
    shades = chart.mark_rect(opacity=0.16).encode(x=alt.X("from:Q"), x2=alt.X2("to:Q"), fill=shade, tooltip=hints)
    labels = chart.mark_text(fontSize=11).encode(
        x=alt.X("middle:Q"), y=alt.Y("worker:N"), text=alt.Text("label:N"), opacity=fits(seconds / scale), tooltip=hints
    )
    return [shades], [labels]
