"""The page of a plan's scaling: throughput, efficiency and goodput against workers, utilisation against the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from stretto.report import units
from stretto.report.charts import ChartSpecs, Layer, data, log_axis
from stretto.report.html import fill, write
from stretto.report.palette import COLORS, NEUTRAL, SHAPES, Style

HEIGHT = 300  # pixels of a chart
HEADS = ("workers", "way", "used", "plan", "batch", "a step", "examples/s", "efficiency", "utilisation", "by")
FAILURE_HEADS = ("goodput", "useful/s", "checkpoint every")


@dataclass(frozen=True, kw_only=True)
class ScaledPlan:
    """The best plan of one kind on a number of workers, and its throughput; None where no plan fits into memory.

    `way` is the kind of plan (data parallel, pipeline, hybrid, ...), `used` how many of the workers it uses. Where
    failures are known, `goodput` is the share of time that is useful work and `useful` the examples a second that are
    not lost; one of the workers that it uses fails once in `mtbf_seconds` (None for never), and a checkpoint of
    `checkpoint_bytes` takes `checkpoint_seconds` after every `interval_seconds` of work (None for never).
    """

    way: str
    workers: int
    batch: int
    plan: str = ""
    used: int = 0
    seconds: float | None = None  # of a step
    throughput: float | None = None  # examples per second
    efficiency: float | None = None  # throughput per worker / that of the fewest workers
    utilisation: float | None = None  # share of all workers' FLOP/s
    simulated: bool = False  # else by a closed form
    goodput: float | None = None
    useful: float | None = None
    mtbf_seconds: float | None = None
    interval_seconds: float | None = None
    checkpoint_seconds: float | None = None
    checkpoint_bytes: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, one text for each of HEADS."""
        if self.seconds is None:
            return (f"{self.workers:,}", self.way, "does not fit", *[units.NONE] * (len(HEADS) - 3))
        return (
            f"{self.workers:,}", self.way, f"{self.used:,}", self.plan, f"{self.batch:,}", units.duration(self.seconds),
            units.number(self.throughput), units.percent(self.efficiency), units.percent(self.utilisation),
            "simulation" if self.simulated else "closed form",
        )  # fmt: skip

    @property
    def failure_cells(self) -> tuple[str, ...]:
        """The rest of the row where failures are known, one text for each of FAILURE_HEADS."""
        every = "never" if self.goodput and self.interval_seconds is None else units.seconds(self.interval_seconds)
        return units.percent(self.goodput), units.number(self.useful), every


def table(rows: Sequence[ScaledPlan]) -> list[tuple[str, ...]]:
    """The heads of the table, and its rows: with what failures cost where that is known."""
    if all(row.goodput is None for row in rows):
        return [HEADS, *(row.cells for row in rows)]
    return [(*HEADS, *FAILURE_HEADS), *((*row.cells, *row.failure_cells) for row in rows)]


def build_scaling(
    path: Path, *, model: str, cluster: str, scaled: Sequence[ScaledPlan], batches: Sequence[ScaledPlan],
    per_worker: bool, facts: Mapping[str, str],
) -> Path:  # fmt: skip
    """Write the page to `path` and return it. `scaled` varies the workers, `batches` the batch size."""
    specs = ChartSpecs()
    ways = list(dict.fromkeys(row.way for row in (*scaled, *batches)))
    styles = {way: Style(COLORS[index], SHAPES[index]) for index, way in enumerate(ways)}
    fitting = [row for row in scaled if row.seconds is not None]
    heads, *rows = table(scaled)
    shown: dict[str, Any] = {
        "title": f"{model} on {cluster}",
        "verdict": verdict(fitting),
        "facts": list(facts.items()),
        "legend": [{"way": way, "style": style} for way, style in styles.items()],
        "batches": "Every worker has a batch of its own, which adds to that of all." if per_worker
        else "The batch stays as it is, however many workers share it.",
        "throughput": specs.add("throughput", throughput_chart(fitting, styles)),
        "efficiency": specs.add("efficiency", efficiency_chart(fitting, styles)),
        "has_goodput": any(row.goodput is not None for row in fitting),
        "goodput": specs.add("goodput", goodput_chart(fitting, styles)),
        "useful": specs.add("useful", useful_chart(fitting, styles)),
        "utilisation": specs.add("utilisation-batch", utilisation_chart(batches, styles)),
        "workers": f"{batches[0].workers:,}" if batches else "",
        "heads": heads,
        "rows": rows,
        "specs": specs.to_json(),
    }  # fmt: skip
    return write(fill("plan.html.j2", shown), path)


def verdict(plans: Sequence[ScaledPlan]) -> str:
    """One sentence on the best plan on the largest number of workers."""
    if not plans:
        return "The model fits on none of these numbers of workers."
    most = max(row.workers for row in plans)
    best = max((row for row in plans if row.workers == most), key=lambda row: row.useful or row.throughput or 0.0)
    return (
        f"On {most:,} workers the best plan, {best.way} ({best.plan}), comes to {units.number(best.throughput)} "
        f"examples a second, {units.percent(best.efficiency, 0)} of what perfect scaling would give, at a utilisation "
        f"of {units.percent(best.utilisation, 0)}."
        + (
            ""
            if best.goodput is None
            else f" Failures leave {units.percent(best.goodput)} of the time for useful work."
        )
    )


def throughput_chart(rows: Sequence[ScaledPlan], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Examples per second against workers, both logarithmic; dotted, perfect scaling of the first hybrid plan."""
    if not rows:
        return None
    x = alt.X("at:Q", **log_axis([row.workers for row in rows], "workers"))
    base = next((row for row in rows if row.way == "hybrid"), rows[0])
    speed = (base.throughput or 0.0) / base.workers
    ends = [min(row.workers for row in rows), max(row.workers for row in rows)]
    ideal = [{"at": end, "value": speed * end} for end in ends]
    values = [*(row.throughput or 0.0 for row in rows), *(end["value"] for end in ideal)]
    y = alt.Y("value:Q", **log_axis(values, "examples a second"))
    perfect = Layer(data(ideal)).mark_line(strokeDash=[2, 4], color=NEUTRAL, strokeWidth=1.4).encode(x=x, y=y)
    return lines([(row.workers, row.throughput, row) for row in rows], x, y, styles, perfect)


def efficiency_chart(rows: Sequence[ScaledPlan], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Throughput per worker / throughput per worker at the fewest workers, against workers."""
    if not rows:
        return None
    x = alt.X("at:Q", **log_axis([row.workers for row in rows], "workers"))
    top = max(1.0, *(row.efficiency or 0.0 for row in rows))
    y = alt.Y("value:Q", title="efficiency", scale=alt.Scale(domain=[0, top]), axis=alt.Axis(format=".0%", tickCount=6))
    return lines([(row.workers, row.efficiency, row) for row in rows], x, y, styles)


def goodput_chart(rows: Sequence[ScaledPlan], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The share of time that is useful work, against workers; None where failures are not known."""
    known = [(row.workers, row.goodput, row) for row in rows if row.goodput is not None]
    if not known:
        return None
    x = alt.X("at:Q", **log_axis([workers for workers, _, _ in known], "workers"))
    axis = alt.Axis(format=".0%", tickCount=6)
    y = alt.Y("value:Q", title="goodput", scale=alt.Scale(domain=[0, 1]), axis=axis)
    return lines(known, x, y, styles)


def useful_chart(rows: Sequence[ScaledPlan], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """Examples a second that are not lost to failures, against workers; None where those are not known."""
    known = [(row.workers, row.useful, row) for row in rows if row.useful]
    if not known:
        return None
    x = alt.X("at:Q", **log_axis([workers for workers, _, _ in known], "workers"))
    y = alt.Y("value:Q", **log_axis([useful or 0.0 for _, useful, _ in known], "useful examples a second"))
    return lines(known, x, y, styles)


def utilisation_chart(rows: Sequence[ScaledPlan], styles: Mapping[str, Style]) -> alt.LayerChart | None:
    """The share of all workers' FLOP/s that forwards and backwards use, against the batch size."""
    fitting = [row for row in rows if row.seconds is not None]
    if not fitting:
        return None
    x = alt.X("at:Q", **log_axis([row.batch for row in fitting], "batch size"))
    y = alt.Y("value:Q", title="utilisation", scale=alt.Scale(zero=True), axis=alt.Axis(format=".0%", tickCount=6))
    return lines([(row.batch, row.utilisation, row) for row in fitting], x, y, styles)


def lines(
    points: Sequence[tuple[int, float | None, ScaledPlan]],
    x: alt.X,
    y: alt.Y,
    styles: Mapping[str, Style],
    *beneath: alt.Chart,
) -> alt.LayerChart:
    """A line with points for each kind of plan; `points` are (x, y, plan)."""
    rows = [
        {"at": at, "value": value, "way": row.way, "plan": row.plan, "used": row.used, "batch": row.batch,
         "step": units.duration(row.seconds or 0.0), "speed": f"{units.number(row.throughput)} examples/s",
         "goodput": units.percent(row.goodput)}
        for at, value, row in points if value is not None
    ]  # fmt: skip
    colors = alt.Scale(domain=list(styles), range=[style.color for style in styles.values()])
    shapes = alt.Scale(domain=list(styles), range=[style.shape for style in styles.values()])
    color = alt.Color("way:N", scale=colors, legend=None)
    told = ["way", "plan", "used", "batch", "step", "speed"]
    told += ["goodput"] if any(row.goodput is not None for _, _, row in points) else []
    hints = [alt.Tooltip(f"{name}:N") for name in told]
    chart = Layer(data(rows)).encode(x=x, y=y, color=color)
    dots = chart.mark_point(filled=True, size=60, opacity=1)
    layers = [
        *beneath,
        chart.mark_line(strokeWidth=2),
        dots.encode(shape=alt.Shape("way:N", scale=shapes, legend=None), tooltip=hints),
    ]
    return alt.LayerChart(layer=layers, width="container", height=HEIGHT)
