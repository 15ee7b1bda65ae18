"""What batch size does: one chart a question, batch size along the axis."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import altair as alt

from stretto.analysis.batch_tradeoff import Tradeoff
from stretto.report import units
from stretto.report.charts.axis import LABELS, log_axis
from stretto.report.charts.rows import color, data, shape
from stretto.report.palette import NEUTRAL, Style
from stretto.report.record import Record

if TYPE_CHECKING:
    from stretto.report.large_batches import AtBatch, StepTime

HEIGHT = 250
CURVE = 40  # points of a fitted curve
Rows = list[dict[str, Any]]


def utilisation_chart(
    seen: Sequence["AtBatch"], lines: Mapping[str, "StepTime | None"], styles: Mapping[str, Style]
) -> alt.LayerChart | None:
    """Throughput as a share of that of an endless batch, by the fitted line of step times; else of the best measured.

    The curve is the fit.
    """
    rows: Rows = []
    for each in seen:
        line, speed = lines[each.method], each.examples_per_second
        if speed is not None:
            most = max(s for other in seen if other.method == each.method and (s := other.examples_per_second))
            text = f"{units.number(speed)} examples/s, {units.flops(speed * each.flops / each.batch)}/s"
            share = speed * line.each if line else speed / most
            rows.append({"method": each.method, "batch": each.batch, "value": share, "text": text})
    if not rows:
        return None
    fitted = [
        {"method": name, "batch": batch, "value": line.utilisation(batch)}
        for name, line in lines.items()
        if line
        for batch in spread([row["batch"] for row in rows])
    ]
    highest = max(1.0, *(row["value"] for row in rows))
    y = alt.Y("value:Q", title="utilisation", scale=alt.Scale(domain=[0, highest]), axis=alt.Axis(format=".0%"))
    return _layers(rows, fitted or rows, batch_axis(seen), y, styles)


def quality_chart(seen: Sequence["AtBatch"], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Test accuracy, or loss where there is none: at each batch's best rate, and dotted at one rate for all."""
    runs = [run for each in seen for run in (*each.tuned, *each.fixed)]
    name = "test_accuracy" if any(run.test_accuracy is not None for run in runs) else "test_loss"
    rows = _quality_rows(seen, name)
    if not rows:
        return None
    form, title = (".1~%", "test accuracy") if name == "test_accuracy" else (LABELS, "test loss")
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(format=form, tickCount=6))
    return _two_ways(rows, batch_axis(seen), y, styles)


def _quality_rows(seen: Sequence["AtBatch"], name: str) -> Rows:
    rows: Rows = []
    for each in seen:
        for what, runs in (("best rate", each.tuned), ("one rate", each.fixed)):
            found = [value for run in runs if (value := getattr(run, name)) is not None]
            if found:
                shown = units.percent(fmean(found)) if name == "test_accuracy" else units.number(fmean(found))
                text = f"{shown}, {what}: {runs[0].option_text}, {len(found)} seed{'s' * (len(found) > 1)}"
                rows.append(_row(each, fmean(found), what, text))
    return rows


def sharpness_chart(
    seen: Sequence["AtBatch"], styles: Mapping[str, Style], of: Callable[[Sequence[Record]], list[float]]
) -> alt.LayerChart | None:
    """The largest eigenvalue at the end, at each batch's best rate, and dotted at one rate for all."""
    rows: Rows = []
    for each in seen:
        for what, runs in (("best rate", each.tuned), ("one rate", each.fixed)):
            values = of(runs)
            if values and fmean(values) > 0:
                text = f"{units.number(fmean(values))}, {what}: {runs[0].option_text}"
                rows.append(_row(each, fmean(values), what, text))
    if not rows:
        return None
    y = alt.Y("value:Q", **log_axis([row["value"] for row in rows], "sharpness at the end"))
    return _two_ways(rows, batch_axis(seen), y, styles)


def noise_chart(
    seen: Sequence["AtBatch"], styles: Mapping[str, Style], of: Callable[[Sequence[Record], float], float | None]
) -> alt.LayerChart | None:
    """The noise scale a quarter into the tuned runs, dotted at their end; a rule where it equals the batch size."""
    rows: Rows = []
    for each in seen:
        for what, part in (("a quarter in", 0.25), ("at the end", 1.0)):
            value = of(each.tuned, part)
            if value:
                rows.append(_row(each, value, what, f"{units.number(value)} examples, {what}"))
    if not rows:
        return None
    ends = [min(each.batch for each in seen), max(each.batch for each in seen)]
    y = alt.Y("value:Q", **log_axis([*(row["value"] for row in rows), *ends], "noise scale, examples"))
    equal = alt.Chart(data([{"batch": end, "value": end} for end in ends])).mark_line(
        strokeDash=[4, 4], color=NEUTRAL, strokeWidth=1
    )
    return _two_ways(rows, batch_axis(seen), y, styles, ("a quarter in", "at the end"), equal)


def tradeoff_chart(
    reached: Mapping[str, Mapping[int, tuple[float, float]]],
    curves: Mapping[str, Tradeoff | None],
    styles: Mapping[str, Style],
) -> alt.LayerChart:
    """Steps against examples to one train loss, a point a batch size, and the hyperbola through them."""
    rows: Rows = [
        {"method": name, "steps": steps, "value": examples, "size": f"{batch}",
         "text": f"batch {batch}: {units.number(steps)} steps, {units.number(examples)} examples"}
        for name, own in reached.items()
        for batch, (steps, examples) in own.items()
    ]  # fmt: skip
    fitted: Rows = [
        {"method": name, "steps": curve.steps(batch), "value": batch * curve.steps(batch), "batch": batch}
        for name, curve in curves.items()
        if curve
        for batch in spread([*reached[name]])
    ]
    both = [*rows, *fitted]
    x = alt.X("steps:Q", **log_axis([row["steps"] for row in both], "steps"))
    y = alt.Y("value:Q", **log_axis([row["value"] for row in both], "examples"))
    chart = _layers(rows, fitted, x, y, styles)
    names = alt.Chart(data(rows)).mark_text(dx=8, dy=-9, fontSize=11).encode(x=x, y=y, text="size:N")
    return alt.LayerChart(layer=[*chart.layer, names]).properties(width="container", height=HEIGHT)


def batch_axis(seen: Sequence["AtBatch"]) -> alt.X:
    """A tick at each batch size that was run, while there is room."""
    sizes = sorted({each.batch for each in seen})
    channel = log_axis(sizes, "batch size", margin=0.06)
    if len(sizes) <= 10:
        channel["axis"] = alt.Axis(values=sizes, format="d")
    return alt.X("batch:Q", **channel)


def spread(sizes: Sequence[float]) -> list[float]:
    """Points of a curve, evenly between the least and the largest on a logarithmic axis."""
    low, high = min(sizes), max(sizes)
    return [low * (high / low) ** (index / CURVE) for index in range(CURVE + 1)]


def _row(each: "AtBatch", value: float, what: str, text: str) -> dict[str, Any]:
    return {"method": each.method, "batch": each.batch, "value": value, "what": what, "text": text}


def _two_ways(
    rows: Rows,
    x: alt.X,
    y: alt.Y,
    styles: Mapping[str, Style],
    ways: tuple[str, str] = ("best rate", "one rate"),
    *beneath: alt.Chart,
) -> alt.LayerChart:
    """The first way strong, the second dotted."""
    first, second = ([row for row in rows if row["what"] == way] for way in ways)
    faint = alt.Chart(data(second)).encode(x=x, y=y, color=color(styles))
    dotted = faint.mark_line(strokeWidth=1.4, strokeDash=[2, 4], opacity=0.8)
    hollow = faint.mark_point(filled=False, size=46, opacity=0.8).encode(shape=shape(styles), tooltip=_hints())
    strong = _layers(first, first, x, y, styles)
    drawn = [each.encode(x=x, y=y) for each in beneath]
    return alt.LayerChart(layer=[*drawn, dotted, hollow, *strong.layer]).properties(width="container", height=HEIGHT)


def _layers(rows: Rows, line: Rows, x: alt.X, y: alt.Y, styles: Mapping[str, Style]) -> alt.LayerChart:
    drawn = alt.Chart(data(line)).encode(x=x, y=y, color=color(styles)).mark_line(strokeWidth=2)
    dots = alt.Chart(data(rows)).encode(x=x, y=y, color=color(styles), shape=shape(styles), tooltip=_hints())
    ordered = drawn.encode(order=alt.Order("batch:Q"))
    return alt.LayerChart(layer=[ordered, dots.mark_point(filled=True, size=62, opacity=1)]).properties(
        width="container", height=HEIGHT
    )


def _hints() -> list[alt.Tooltip]:
    return [alt.Tooltip("method:N"), alt.Tooltip("text:N", title="value")]
