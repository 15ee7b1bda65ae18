"""The page of `stretto inspect`: by stage the delay of gradients, their direction, and what outputs say about classes.

Cosines and head losses are drawn against the step, probes against the stage.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import ChartSpecs, Layer, checked, data, loss_axis, stage_axis
from stretto.report.html import fill, write
from stretto.report.palette import NEUTRAL, styles
from stretto.report.record import Measurement, Record

HEIGHT = 240  # pixels of a chart
SAME = 0.995  # a cosine above which no figure tells two directions apart
LEGEND_STAGES = 10  # stages that a legend can name one by one
HEADS = ("stage", "what", "head", "delay", "head's loss", "cosine", "probe")
REMEDY = "run it again with --measure {} (and another --out; its numbers stay the same)"


Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class InspectedRun:
    """A run; by stage, its modules and its head in a few words, and the delay of its gradients, in updates."""

    record: Record
    stages: tuple[str, ...]
    heads: tuple[str, ...]
    delays: tuple[int, ...]

    @property
    def outcome(self) -> str:
        """The run's options and seed, and its accuracy on training and validation data, as text."""
        record, accuracy = self.record, ""
        if record.points and record.points[-1].train_accuracy is not None:
            last = record.points[-1]
            train, validation = units.percent(last.train_accuracy), units.percent(last.validation_accuracy)
            accuracy = f"; accuracy {train} on training data, {validation} on validation"
        return f"{record.option_text}, seed {record.seed}{accuracy}"

    def last(self, field: str) -> Any:
        """The last value of a field of `Measurement`; None if it was never measured."""
        measurements = with_field(self.record, field)
        return getattr(measurements[-1], field) if measurements else None

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """One row of text for each stage, under HEADS; of the cosines the first and the last."""
        losses, probes = self.last("local_losses"), self.last("probes")
        cosines = [measurement.cosines for measurement in with_field(self.record, "cosines")]
        return [
            (
                f"{stage}",
                what,
                self.heads[stage] or units.NONE,
                f"{self.delays[stage]}",
                units.number(losses[stage]) if losses else units.NONE,
                first_and_last([by_stage[stage] for by_stage in cosines if by_stage is not None]),
                units.percent(probes[stage]) if probes else units.NONE,
            )
            for stage, what in enumerate(self.stages)
        ]

    @property
    def verdict(self) -> str:
        """One sentence on the last measurements, with the stage that each is of."""
        cosines, probes = self.last("cosines"), self.last("probes")
        told = []
        if low := min(stages_with(cosines), default=None):
            unlike = f"gradients point least like backpropagation's at stage {low[1]} (cosine {low[0]:.2f})"
            told.append(unlike if low[0] < SAME else "gradients point as backpropagation's do")
        if best := max(stages_with(probes), default=None):
            told.append(f"a linear probe finds most at stage {best[1]} ({units.percent(best[0])})")
        return f"{self.record.method}: {'; '.join(told) or 'neither cosines nor probes were measured'}."

    @property
    def missing(self) -> list[str]:
        """Sentences on what was not measured, with the flag that measures it."""
        wanted = {
            "cosine": ("cosines", "no cosines and no losses of heads"),
            "probes": ("probes", "no linear probes"),
            "filters": ("filters", "no filters"),
        }
        without = {name: what for name, (field, what) in wanted.items() if self.last(field) is None}
        advised = [name for name in without if name != "filters" or len(without) == len(wanted)]
        sentences = (
            [f"{', '.join(without[name] for name in advised)}: {REMEDY.format(','.join(advised))}"] if advised else []
        )
        if "filters" in without and "filters" not in advised:
            sentences.append(
                f"no filters: {REMEDY.format('filters')}; they are of a convolution, or of a Linear that takes images"
            )
        return sentences

    def to_json(self) -> dict[str, Any]:
        """The object that `stretto inspect --json` prints: all measurements but pictures."""
        keys = ("step", "cosines", "local_losses", "probes")
        return {
            "run": self.record.id,
            "method": self.record.method,
            "stages": list(self.stages),
            "heads": list(self.heads),
            "delays": list(self.delays),
            "train_accuracy": self.record.points[-1].train_accuracy if self.record.points else None,
            "measured": [{key: getattr(measurement, key) for key in keys} for measurement in self.record.measurements],
            "missing": self.missing,
        }


def stages_with(values: Sequence[float | None] | None) -> list[tuple[float, int]]:
    """(value, stage) of the stages that have one."""
    return [(value, stage) for stage, value in enumerate(values or ()) if value is not None]


def with_field(record: Record, field: str) -> list[Measurement]:
    """The measurements of a run in which this field is not None."""
    return [measurement for measurement in record.measurements if getattr(measurement, field) is not None]


def first_and_last(values: Sequence[float | None]) -> str:
    """The first and the last of some values as text, e.g. `0.42 → 0.61`; a single one alone."""
    ends = [units.NONE if value is None else f"{value:.2f}" for value in values]
    return units.NONE if not ends else ends[0] if len(ends) == 1 else f"{ends[0]} → {ends[-1]}"


def build_inspection(path: Path, *, title: str, inspected: Sequence[InspectedRun], facts: Mapping[str, str]) -> Path:
    """Write the page to `path` and return it."""
    specs = ChartSpecs()
    look = styles([run.record.method for run in inspected])
    shown: dict[str, Any] = {
        "title": title,
        "verdict": [run.verdict for run in inspected],
        "facts": list(facts.items()),
        "runs": [_run(run, number, specs) for number, run in enumerate(inspected)],
        "legend": [{"method": method, "style": style} for method, style in look.items()],
        "heads": HEADS,
        "specs": specs.to_json(),
    }
    return write(fill("inspect.html.j2", shown), path)


def _run(run: InspectedRun, number: int, specs: ChartSpecs) -> dict[str, Any]:
    record = run.record
    with_filters = with_field(record, "filters")
    last = with_filters[-1] if with_filters else None
    drawn = None if last is None else picture(last.filters or (), last.filter_shape or (1, 1, 1), record.id)
    return {
        "method": record.method,
        "what": run.outcome,
        "rows": run.rows,
        "missing": run.missing,
        "cosines": specs.add(f"cosine-{number}", cosine_chart(with_field(record, "cosines"))),
        "losses": specs.add(f"loss-{number}", loss_chart(with_field(record, "local_losses"))),
        "probes": specs.add(f"probe-{number}", probe_chart(with_field(record, "probes"))),
        "filters": drawn,
        "filters_step": 0 if last is None else last.step,
    }


def cosine_chart(measurements: Sequence[Measurement]) -> alt.LayerChart | None:
    """Cosine between local and backprop gradients against the step; a rule at 1, where both point the same way."""
    rows = stage_rows(measurements, "cosines", lambda value: f"{value:.3f}")
    if not rows:
        return None
    low = min(0.0, *(row["value"] for row in rows))
    y = alt.Y("value:Q", title="cosine to backprop's gradient", scale=alt.Scale(domain=[low, 1.0], nice=True))
    same = Layer(data([{"value": 1.0}])).mark_rule(strokeDash=[4, 4], color=NEUTRAL).encode(y=alt.Y("value:Q"))
    return lines(rows, y, same)


def loss_chart(measurements: Sequence[Measurement]) -> alt.LayerChart | None:
    """The loss of every head against the step."""
    rows = stage_rows(measurements, "local_losses", units.number)
    if not rows:
        return None
    return lines(rows, alt.Y("value:Q", **loss_axis([row["value"] for row in rows], "loss of the stage's head")))


def probe_chart(measurements: Sequence[Measurement]) -> alt.LayerChart | None:
    """Accuracy of linear probes against stage: a line for each time they were fitted, the last one strong."""
    rows = stage_rows(measurements, "probes", units.percent)
    if not rows:
        return None
    last = max(row["step"] for row in rows)
    low = min(row["value"] for row in rows)
    scale = alt.Scale(zero=False, nice=True, domainMin=max(0.0, low - 0.05))
    y = alt.Y("value:Q", title="accuracy of a linear probe", scale=scale, axis=alt.Axis(format=".0%"))
    color = alt.Color("step:O", title="step", scale=alt.Scale(scheme="viridis", reverse=True))
    base = Layer(data(rows)).encode(
        x=stage_axis(1 + max(row["stage"] for row in rows)), y=y, color=color, tooltip=hints()
    )
    width = alt.StrokeWidthValue(1.4, condition={"test": f"datum.step == {last}", "value": 2.6})
    drawn = base.mark_line().encode(strokeWidth=width)
    return layered(drawn, base.mark_point(filled=True, size=52, opacity=1))


def stage_rows(measurements: Sequence[Measurement], field: str, form: Callable[[float], str]) -> Rows:
    """One row for each measurement and stage that has a value."""
    return [
        {"step": measurement.step, "stage": stage, "value": value, "text": form(value)}
        for measurement in measurements
        for stage, value in enumerate(getattr(measurement, field))
        if value is not None
    ]


def lines(rows: Rows, y: alt.Y, *beneath: alt.Chart) -> alt.LayerChart:
    """Values against the step: a line for each stage, from dark (the input's side) to light."""
    few = 1 + max(row["stage"] for row in rows) <= LEGEND_STAGES
    steps = sorted({row["step"] for row in rows})
    x = alt.X("step:Q", title="step", axis=alt.Axis(values=steps, format="d"), scale=alt.Scale(nice=False, padding=10))
    color = alt.Color(f"stage:{'O' if few else 'Q'}", title="stage", scale=alt.Scale(scheme="viridis"))
    base = Layer(data(rows)).encode(x=x, y=y, color=color, tooltip=hints())
    drawn = base.mark_line(strokeWidth=2).encode(detail=alt.Detail("stage:O"))
    return layered(*beneath, drawn, base.mark_point(filled=True, size=52, opacity=1))


def hints() -> list[alt.Tooltip]:
    """What the pointer shows over a point: stage, step and value."""
    return [alt.Tooltip("stage:O"), alt.Tooltip("step:Q"), alt.Tooltip("text:N", title="value")]


def layered(*layers: alt.Chart) -> alt.LayerChart:
    """Charts on top of one another, as wide as the page gives them room."""
    return alt.LayerChart(layer=list(layers), width="container", height=HEIGHT)


SIDE, GAP, COLUMNS = 72, 8, 9  # pixels, pixels, images
MOST_RECTANGLES = 9000  # of a picture: filters beyond are left out


def picture(filters: Sequence[str], shape: Sequence[int], what: str) -> str:
    """An SVG of filters: three channels are drawn as colors, of any other number the first one in grey.

    `filters` are texts of channels * height * width bytes in hexadecimal, `shape` is (channels, height, width); `what`
    names the picture in errors.
    """
    channels, height, width = shape
    size = height * width
    shown = filters[: max(1, MOST_RECTANGLES // size)]
    pixel = SIDE / max(height, width)
    tiles = []
    for number, text in enumerate(shown):
        left, top = (SIDE + GAP) * (number % COLUMNS), (SIDE + GAP) * (number // COLUMNS)
        values = bytes.fromhex(text)
        for place in range(size):
            grey = (values[place],) * 3
            color = (values[place], values[size + place], values[2 * size + place]) if channels == 3 else grey
            row, column = divmod(place, width)
            tiles.append(
                f'<rect x="{left + column * pixel:.2f}" y="{top + row * pixel:.2f}" width="{pixel:.2f}" '
                f'height="{pixel:.2f}" fill="#{bytes(color).hex()}"/>'
            )
    across = min(len(shown), COLUMNS) * (SIDE + GAP) - GAP
    down = math.ceil(len(shown) / COLUMNS) * (SIDE + GAP) - GAP
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" width="{across}" height="{down}" '
        f'shape-rendering="crispEdges" role="img">{"".join(tiles)}</svg>'
    )
    return checked(svg, what)
