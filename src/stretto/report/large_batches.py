"""The part of the page on batch size: utilisation, accuracy, sharpness, noise, steps against examples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import altair as alt

from stretto.analysis.batch_tradeoff import Tradeoff, fit, positive_weights
from stretto.report import units
from stretto.report.charts import LABELS, ChartSpecs, Layer, color, data, log_axis, shape
from stretto.report.metric import TRAIN_LOSS, Metric
from stretto.report.palette import NEUTRAL, Style
from stretto.report.panel import crossing, panels
from stretto.report.record import Measurement, Record, methods
from stretto.report.summary import best_configuration, judge

RATE, BATCH = "lr", "batch_size"
HEIGHT = 250  # pixels of a chart
CURVE_POINTS = 40  # of a fitted curve
PARAMETERS = 2  # of each curve fitted here: as many points it meets exactly, whatever they are, so it needs more
Rows = list[dict[str, Any]]
Steps = dict[str, dict[int, tuple[float, float]]]  # {method: {batch size: (steps, examples)}}


@dataclass(frozen=True)
class BatchRuns:
    """The runs of a method at one batch size.

    `tuned` are those of the configuration that is best on validation at this batch size, one a seed; `fixed` those at
    the learning rate that is best at the smallest batch size. `seconds` is the median time of a step.
    """

    method: str
    batch: int
    tuned: tuple[Record, ...]
    fixed: tuple[Record, ...]
    seconds: float | None
    flops: float  # of a step, all workers together

    @property
    def examples_per_second(self) -> float | None:
        """The throughput of training; None if no step was timed."""
        return self.batch / self.seconds if self.seconds else None


@dataclass(frozen=True)
class StepTime:
    """The time of a step is `fixed + batch * per_example` seconds."""

    fixed: float
    per_example: float

    def utilisation(self, batch: float) -> float:
        """Throughput / its limit for ever larger batches: `b / (b + fixed / per_example)`."""
        return batch / (batch + self.fixed / self.per_example)


def by_batch_size(records: Sequence[Record]) -> tuple[BatchRuns, ...]:
    """The runs of every method at every batch size, in the order of the methods; empty with one batch size only."""
    usable = [record for record in records if isinstance(record.options.get(BATCH), int)]
    if len({record.options[BATCH] for record in usable}) < 2:
        return ()
    metric = judge(records)
    return tuple(
        batch_runs
        for method in methods(tuple(usable))
        for batch_runs in _of_method([record for record in usable if record.method == method], metric)
    )


def _of_method(records: Sequence[Record], metric: Metric) -> list[BatchRuns]:
    result: list[BatchRuns] = []
    rate: Any = None
    for batch in sorted({record.options[BATCH] for record in records}):
        runs = [record for record in records if record.options[BATCH] == batch]
        tuned = best_configuration(runs, metric)
        if rate is None and tuned:
            rate = tuned[0].options.get(RATE)
        fixed = tuple(run for run in runs if run.options.get(RATE) == rate and not run.diverged)
        times = [run.seconds_per_step for run in runs if run.seconds_per_step]
        flops = max((last.total_flops / last.step for run in runs for last in run.points[-1:]), default=0.0)
        result.append(BatchRuns(runs[0].method, batch, tuned, fixed, median(times) if times else None, flops))
    return result


def step_time(measured: Sequence[BatchRuns]) -> StepTime | None:
    """The line through one method's step times with the least relative error.

    None if a coefficient is not positive, or if no more batch sizes were timed than a line has parameters.
    """
    rows = [(1 / entry.seconds, entry.batch / entry.seconds) for entry in measured if entry.seconds]
    weights = positive_weights(rows) if len(rows) > PARAMETERS else None
    return None if weights is None else StepTime(*weights)


def arrivals(records: Sequence[Record]) -> tuple[float, Steps] | None:
    """The train loss that most methods and batch sizes reach, of several the lowest; and the fewest steps to it.

    None if no method reaches any cut-off at two batch sizes.
    """
    best: tuple[float, Steps] | None = None
    for panel in reversed(panels(records, TRAIN_LOSS)):
        reached: Steps = {}
        for record in records:
            at = crossing(record, TRAIN_LOSS, panel.cutoff)
            batch = record.options.get(BATCH)
            if at is not None and isinstance(batch, int):
                by_batch = reached.setdefault(record.method, {})
                fewest = by_batch.get(batch, (math.inf, math.inf))
                by_batch[batch] = min((at.step, at.examples), fewest)
        if best is None or _count(reached) > _count(best[1]):
            best = panel.cutoff, reached
    return best if best is not None and any(len(by_batch) > 1 for by_batch in best[1].values()) else None


def _count(reached: Steps) -> int:
    return sum(map(len, reached.values()))


def noise_of(runs: Sequence[Record], part: float) -> float | None:
    """The noise scale tr Σ / |G|² at a share `part` of the runs (1: their end), both averaged over seeds first.

    None if nothing was measured, or |G|² is not positive.
    """
    measurements = [measurement for run in runs if (measurement := measurement_at(run, part)) is not None]
    pairs = [(measurement.noise_trace, measurement.gradient_square) for measurement in measurements]
    whole = [(trace, square) for trace, square in pairs if trace is not None and square is not None]
    square = fmean(square for _, square in whole) if whole else 0.0
    return fmean(trace for trace, _ in whole) / square if square > 0 else None


def measurement_at(run: Record, part: float) -> Measurement | None:
    """The measurement nearest to a share `part` of a run's steps; None without measurements, or if it diverged."""
    if not run.measurements or run.diverged:
        return None
    last = run.measurements[-1].step
    return min(run.measurements, key=lambda measurement: abs(measurement.step - part * last))


def sharpness_of(runs: Sequence[Record]) -> list[float]:
    """The sharpness at the end of each run that has one."""
    last = [measurement_at(run, 1) for run in runs]
    return [m.sharpness for m in last if m is not None and m.sharpness is not None]


def section(records: Sequence[Record], styles: Mapping[str, Style], specs: ChartSpecs) -> dict[str, Any] | None:
    """The part of the page on batch size; None with one batch size only."""
    measured = by_batch_size(records)
    if not measured:
        return None
    lines = {name: step_time([entry for entry in measured if entry.method == name]) for name in styles}
    reached = arrivals(records)
    found = {} if reached is None else reached[1]
    curves = {name: fit(list(own.values())) if len(own) > PARAMETERS else None for name, own in found.items()}
    return {
        "utilisation": specs.add("batch-utilisation", utilisation_chart(measured, lines, styles)),
        "relative": any(line is None for line in lines.values()),
        "fitted": any(line is not None for line in lines.values()),
        "curved": any(curve is not None for curve in curves.values()),
        "accuracy": specs.add("batch-accuracy", quality_chart(measured, styles)),
        "sharpness": specs.add("batch-sharpness", sharpness_chart(measured, styles)),
        "noise": specs.add("batch-noise", noise_chart(measured, styles)),
        "tradeoff": None
        if reached is None
        else specs.add("batch-tradeoff", tradeoff_chart(reached[1], curves, styles)),
        "goal": "" if reached is None else units.cutoff(reached[0], False),
        "critical": [_critical(name, curve, len(found[name])) for name, curve in curves.items()],
    }


def _critical(method: str, curve: Tradeoff | None, sizes: int) -> str:
    if sizes <= PARAMETERS:
        short = f"{sizes} batch size{'s' * (sizes > 1)} got there"
        return f"{method}: {short}, too few for a curve with {PARAMETERS} parameters"
    if curve is None:
        return f"{method}: its runs do not bend so"
    least = f"at least {units.number(curve.min_steps)} steps and {units.number(curve.min_examples)} examples"
    return f"{method}: critical batch {units.number(curve.critical_batch)}, {least}"


def utilisation_chart(
    measured: Sequence[BatchRuns], lines: Mapping[str, StepTime | None], styles: Mapping[str, Style]
) -> alt.LayerChart | None:
    """Throughput / its limit for ever larger batches, by the fitted line of step times; without a fit / the largest.

    Points are measured, curves are the fit.
    """
    rows: Rows = []
    for entry in measured:
        line, speed = lines[entry.method], entry.examples_per_second
        if speed is not None:
            most = max(s for other in measured if other.method == entry.method and (s := other.examples_per_second))
            text = f"{units.number(speed)} examples/s, {units.flops(speed * entry.flops / entry.batch)}/s"
            share = speed * line.per_example if line else speed / most
            rows.append({"method": entry.method, "batch": entry.batch, "value": share, "text": text})
    if not rows:
        return None
    fitted = [
        {"method": name, "batch": batch, "value": line.utilisation(batch)}
        for name, line in lines.items()
        if line
        for batch in points_between([row["batch"] for row in rows])
    ]
    highest = max(1.0, *(row["value"] for row in rows))
    y = alt.Y("value:Q", title="utilisation", scale=alt.Scale(domain=[0, highest]), axis=alt.Axis(format=".0%"))
    return _layers(rows, fitted or rows, batch_axis(measured), y, styles)


def quality_chart(measured: Sequence[BatchRuns], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Test accuracy, or test loss without one: at each batch's best rate; dotted, at one rate for all."""
    runs = [run for entry in measured for run in (*entry.tuned, *entry.fixed)]
    name = "test_accuracy" if any(run.test_accuracy is not None for run in runs) else "test_loss"
    rows = _quality_rows(measured, name)
    if not rows:
        return None
    form, title = (".1~%", "test accuracy") if name == "test_accuracy" else (LABELS, "test loss")
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(format=form, tickCount=6))
    return _strong_and_dotted(rows, batch_axis(measured), y, styles)


def _quality_rows(measured: Sequence[BatchRuns], name: str) -> Rows:
    rows: Rows = []
    for entry in measured:
        for what, runs in (("best rate", entry.tuned), ("one rate", entry.fixed)):
            values = [value for run in runs if (value := getattr(run, name)) is not None]
            if values:
                shown = units.percent(fmean(values)) if name == "test_accuracy" else units.number(fmean(values))
                text = f"{shown}, {what}: {runs[0].option_text}, {len(values)} seed{'s' * (len(values) > 1)}"
                rows.append(_row(entry, fmean(values), what, text))
    return rows


def sharpness_chart(measured: Sequence[BatchRuns], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The Hessian's largest eigenvalue at the end of runs: at each batch's best rate; dotted, at one rate for all."""
    rows: Rows = []
    for entry in measured:
        for what, runs in (("best rate", entry.tuned), ("one rate", entry.fixed)):
            values = sharpness_of(runs)
            if values and fmean(values) > 0:
                text = f"{units.number(fmean(values))}, {what}: {runs[0].option_text}"
                rows.append(_row(entry, fmean(values), what, text))
    if not rows:
        return None
    y = alt.Y("value:Q", **log_axis([row["value"] for row in rows], "sharpness at the end"))
    return _strong_and_dotted(rows, batch_axis(measured), y, styles)


def noise_chart(measured: Sequence[BatchRuns], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The noise scale a quarter into the tuned runs, dotted at their end; a rule where it equals the batch size."""
    rows: Rows = []
    for entry in measured:
        for what, part in (("a quarter in", 0.25), ("at the end", 1.0)):
            value = noise_of(entry.tuned, part)
            if value:
                rows.append(_row(entry, value, what, f"{units.number(value)} examples, {what}"))
    if not rows:
        return None
    ends = [min(entry.batch for entry in measured), max(entry.batch for entry in measured)]
    y = alt.Y("value:Q", **log_axis([*(row["value"] for row in rows), *ends], "noise scale, examples"))
    equal = Layer(data([{"batch": end, "value": end} for end in ends])).mark_line(
        strokeDash=[4, 4], color=NEUTRAL, strokeWidth=1
    )
    return _strong_and_dotted(rows, batch_axis(measured), y, styles, ("a quarter in", "at the end"), equal)


def tradeoff_chart(
    reached: Mapping[str, Mapping[int, tuple[float, float]]],
    curves: Mapping[str, Tradeoff | None],
    styles: Mapping[str, Style],
) -> alt.LayerChart:
    """Steps against examples to one train loss, a point a batch size, and the hyperbola through them."""
    rows: Rows = [
        {
            "method": name,
            "steps": steps,
            "value": examples,
            "size": f"{batch}",
            "text": f"batch {batch}: {units.number(steps)} steps, {units.number(examples)} examples",
        }
        for name, by_batch in reached.items()
        for batch, (steps, examples) in by_batch.items()
    ]
    fitted: Rows = [
        {"method": name, "steps": curve.steps(batch), "value": batch * curve.steps(batch), "batch": batch}
        for name, curve in curves.items()
        if curve
        for batch in points_between([*reached[name]])
    ]
    both = [*rows, *fitted]
    x = alt.X("steps:Q", **log_axis([row["steps"] for row in both], "steps"))
    y = alt.Y("value:Q", **log_axis([row["value"] for row in both], "examples"))
    chart = _layers(rows, fitted, x, y, styles)
    names = Layer(data(rows)).mark_text(dx=8, dy=-9, fontSize=11).encode(x=x, y=y, text=alt.Text("size:N"))
    return alt.LayerChart(layer=[*chart.layer, names], width="container", height=HEIGHT)


def batch_axis(measured: Sequence[BatchRuns]) -> alt.X:
    """The logarithmic axis of batch sizes; with up to ten of them, a tick at each."""
    sizes = sorted({entry.batch for entry in measured})
    channel = log_axis(sizes, "batch size", margin=0.06)
    if len(sizes) <= 10:
        channel["axis"] = alt.Axis(values=sizes, format="d")
    return alt.X("batch:Q", **channel)


def points_between(sizes: Sequence[float]) -> list[float]:
    """CURVE_POINTS + 1 batch sizes, evenly spaced on a logarithmic axis from the least to the largest."""
    low, high = min(sizes), max(sizes)
    return [low * (high / low) ** (index / CURVE_POINTS) for index in range(CURVE_POINTS + 1)]


def _row(entry: BatchRuns, value: float, what: str, text: str) -> dict[str, Any]:
    return {"method": entry.method, "batch": entry.batch, "value": value, "what": what, "text": text}


def _strong_and_dotted(
    rows: Rows,
    x: alt.X,
    y: alt.Y,
    styles: Mapping[str, Style],
    groups: tuple[str, str] = ("best rate", "one rate"),
    *beneath: alt.Chart,
) -> alt.LayerChart:
    """Lines through two groups of rows: the first strong, the second dotted."""
    first, second = ([row for row in rows if row["what"] == group] for group in groups)
    faint = Layer(data(second)).encode(x=x, y=y, color=color(styles))
    dotted = faint.mark_line(strokeWidth=1.4, strokeDash=[2, 4], opacity=0.8)
    hollow = faint.mark_point(filled=False, size=46, opacity=0.8).encode(shape=shape(styles), tooltip=_hints())
    strong = _layers(first, first, x, y, styles)
    drawn = [layer.encode(x=x, y=y) for layer in beneath]
    return alt.LayerChart(layer=[*drawn, dotted, hollow, *strong.layer], width="container", height=HEIGHT)


def _layers(rows: Rows, line: Rows, x: alt.X, y: alt.Y, styles: Mapping[str, Style]) -> alt.LayerChart:
    drawn = Layer(data(line)).encode(x=x, y=y, color=color(styles)).mark_line(strokeWidth=2)
    dots = Layer(data(rows)).encode(x=x, y=y, color=color(styles), shape=shape(styles), tooltip=_hints())
    ordered = drawn.encode(order=alt.Order("batch:Q"))
    layers = [ordered, dots.mark_point(filled=True, size=62, opacity=1)]
    return alt.LayerChart(layer=layers, width="container", height=HEIGHT)


def _hints() -> list[alt.Tooltip]:
    return [alt.Tooltip("method:N"), alt.Tooltip("text:N", title="value")]
