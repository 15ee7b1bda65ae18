"""Plans at scale, as stretto plan --scale tells and draws them.

The page has throughput, efficiency and goodput against workers, and utilisation against the batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import altair as alt

from stretto.plan import Problem
from stretto.plan.explain import describe_axes, size
from stretto.plan.reliability import Reliability, needs
from stretto.plan.scaling_study import Scaled, batches, scaling
from stretto.report import units
from stretto.report.charts import ChartSpecs, Layer, data, log_axis
from stretto.report.html import fill, write
from stretto.report.palette import COLORS, NEUTRAL, SHAPES, Style

HEIGHT = 300  # pixels of a chart
TITLES = {"workers": "workers", "batch": "batch size"}  # of horizontal axes
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

    @classmethod
    def of(cls, scaled: Scaled) -> "ScaledPlan":
        """A row of the table and a point of the charts; without a plan where none fits."""
        plan, left = scaled.plan, scaled.goodput
        if plan is None:
            return cls(way=scaled.way, workers=scaled.workers, batch=scaled.batch)
        c = plan.candidate
        axes = describe_axes(c.mesh.data, c.pipeline, c.mesh.tensor, c.mesh.space)
        failures: dict[str, Any] = (
            {}
            if left is None
            else {
                "goodput": left.share,
                "useful": scaled.useful_per_second,
                "interval_seconds": left.interval_seconds,
                "mtbf_seconds": None if math.isinf(left.mtbf_seconds) else left.mtbf_seconds,
                "checkpoint_seconds": left.checkpoint_seconds,
                "checkpoint_bytes": left.checkpoint_bytes,
            }
        )
        return cls(
            way=scaled.way,
            workers=scaled.workers,
            batch=scaled.batch,
            plan=", ".join([str(c), *axes]),
            used=c.workers,
            seconds=plan.seconds,
            throughput=scaled.examples_per_second,
            efficiency=scaled.efficiency,
            utilisation=scaled.utilisation,
            simulated=plan.simulated,
            **failures,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, one text for each of HEADS."""
        if self.seconds is None:
            return (f"{self.workers:,}", self.way, "does not fit", *[units.NONE] * (len(HEADS) - 3))
        return (
            f"{self.workers:,}",
            self.way,
            f"{self.used:,}",
            self.plan,
            f"{self.batch:,}",
            units.duration(self.seconds),
            units.number(self.throughput),
            units.percent(self.efficiency),
            units.percent(self.utilisation),
            "simulation" if self.simulated else "closed form",
        )

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


def study_scaling(
    problem: Problem,
    model: str,
    numbers: Sequence[int],
    file: Path,
    *,
    per_worker: bool,
    known: Reliability | None = None,
    wanted: Sequence[str] = (),
) -> dict[str, Any]:
    """Plan for every number of workers, write the page, and give both as plain data.

    `known` is of failures; `wanted` are the names of what it takes to know them, if something is missing.
    """
    rows = [ScaledPlan.of(each) for each in scaling(problem, numbers, per_worker=per_worker, known=known)]
    batch = problem.batch_sizes[0] * (problem.workers if per_worker else 1)
    by_batch = [ScaledPlan.of(each) for each in batches(problem, batch)]
    facts = {
        "Model": f"{model}, {len(problem.layers)} layers, {problem.costs.dtype}",
        "Cluster": f"{problem.cluster.name}, {problem.cluster.num_workers:,} workers, more nodes where it takes them",
        "Batch": f"{problem.batch_sizes[0]:,} examples{' of each worker' if per_worker else ''}",
        "Methods": ", ".join(problem.names),
        **failure_facts(rows, known),
    }
    build_scaling(
        file,
        model=model,
        cluster=problem.cluster.name,
        scaled=rows,
        by_batch=by_batch,
        per_worker=per_worker,
        facts=facts,
    )
    return {
        "page": str(file),
        "rows": [asdict(row) for row in rows],
        "batches": [asdict(row) for row in by_batch],
        "goodput_needs": list(wanted),
    }


def failure_facts(rows: Sequence[ScaledPlan], known: Reliability | None) -> dict[str, str]:
    """What is known of failures, for the head of the page."""
    first = next((row for row in rows if row.goodput is not None), None)
    if known is None or first is None:
        return {}
    hours = f"{units.number(first.mtbf_seconds * first.used / 3600)} h" if first.mtbf_seconds else "infinite"
    restart, interval = units.seconds(known.restart_seconds), known.checkpoint_interval
    every = "at the best interval" if interval is None else f"every {units.seconds(interval)} of work"
    return {
        "Failures": f"MTBF of a worker {hours}; a failure stops all; a restart takes {restart}",
        "Checkpoints": f"{size(first.checkpoint_bytes or 0.0)} in {units.seconds(first.checkpoint_seconds)}, {every}",
    }


def build_scaling(
    path: Path,
    *,
    model: str,
    cluster: str,
    scaled: Sequence[ScaledPlan],
    by_batch: Sequence[ScaledPlan],
    per_worker: bool,
    facts: Mapping[str, str],
) -> Path:
    """Write the page to `path` and return it. `scaled` varies the workers, `by_batch` the batch size."""
    specs = ChartSpecs()
    ways = list(dict.fromkeys(row.way for row in (*scaled, *by_batch)))
    styles = {way: Style(COLORS[index], SHAPES[index]) for index, way in enumerate(ways)}
    fitting, of_sizes = ([row for row in rows if row.seconds is not None] for rows in (scaled, by_batch))
    base = next((row for row in fitting if row.way == "hybrid"), fitting[0] if fitting else None)
    speed = 0.0 if base is None else (base.throughput or 0.0) / base.workers
    ends = [row.workers for row in fitting]
    perfect = [{"at": end, "value": speed * end} for end in ((min(ends), max(ends)) if ends else ())]
    top = max([1.0, *(row.efficiency or 0.0 for row in fitting)])
    lost = [row for row in fitting if row.goodput is not None]
    charts = {
        "throughput": chart(fitting, styles, "throughput", "examples a second", perfect=perfect),
        "efficiency": chart(fitting, styles, "efficiency", share_axis("efficiency", domain=[0, top])),
        "goodput": chart(lost, styles, "goodput", share_axis("goodput", domain=[0, 1])),
        "useful": chart([row for row in fitting if row.useful], styles, "useful", "useful examples a second"),
        "utilisation-batch": chart(of_sizes, styles, "utilisation", share_axis("utilisation", zero=True), x="batch"),
    }
    heads, *rows = table(scaled)
    shown: dict[str, Any] = {
        "title": f"{model} on {cluster}",
        "verdict": verdict(fitting),
        "facts": list(facts.items()),
        "legend": [{"way": way, "style": style} for way, style in styles.items()],
        "batches": "Every worker has a batch of its own, which adds to that of all."
        if per_worker
        else "The batch stays as it is, however many workers share it.",
        **{name.partition("-")[0]: specs.add(name, drawn) for name, drawn in charts.items()},
        "has_goodput": bool(lost),
        "workers": f"{by_batch[0].workers:,}" if by_batch else "",
        "heads": heads,
        "rows": rows,
        "specs": specs.to_json(),
    }
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


def share_axis(title: str, **scale: Any) -> dict[str, Any]:
    """The `scale`, `axis` and `title` of a channel of shares."""
    return {"title": title, "scale": alt.Scale(**scale), "axis": alt.Axis(format=".0%", tickCount=6)}


def chart(
    plans: Sequence[ScaledPlan],
    styles: Mapping[str, Style],
    field: str,
    y: str | Mapping[str, Any],
    *,
    x: str = "workers",
    perfect: Sequence[Mapping[str, float]] = (),
) -> alt.LayerChart | None:
    """A line with points for each kind of plan: a `field` of each against its `x`. None without plans.

    The axes are logarithmic; `y` is the title of one, or a channel of another. `perfect` are points of a dotted line.
    """
    if not plans:
        return None
    rows = [
        {
            "at": getattr(row, x),
            "value": getattr(row, field),
            "way": row.way,
            "plan": row.plan,
            "used": row.used,
            "batch": row.batch,
            "step": units.duration(row.seconds or 0.0),
            "speed": f"{units.number(row.throughput)} examples/s",
            "goodput": units.percent(row.goodput),
        }
        for row in plans
        if getattr(row, field) is not None
    ]
    values = [*(getattr(row, field) or 0.0 for row in plans), *(end["value"] for end in perfect)]
    at = sorted({getattr(row, x) for row in plans})
    x_axis = alt.X("at:Q", **(log_axis(at, TITLES[x]) | {"axis": alt.Axis(values=at, format=",d")}))
    y_axis = alt.Y("value:Q", **(log_axis(values, y) if isinstance(y, str) else y))
    dotted = Layer(data(perfect)).mark_line(strokeDash=[2, 4], color=NEUTRAL, strokeWidth=1.4)
    colors = alt.Scale(domain=list(styles), range=[style.color for style in styles.values()])
    shapes = alt.Scale(domain=list(styles), range=[style.shape for style in styles.values()])
    told = ["way", "plan", "used", "batch", "step", "speed"]
    told += ["goodput"] if any(row.goodput is not None for row in plans) else []
    hints = [alt.Tooltip(f"{name}:N") for name in told]
    drawn = Layer(data(rows)).encode(x=x_axis, y=y_axis, color=alt.Color("way:N", scale=colors, legend=None))
    dots = drawn.mark_point(filled=True, size=60, opacity=1)
    layers = [
        *([dotted.encode(x=x_axis, y=y_axis)] if perfect else []),
        drawn.mark_line(strokeWidth=2),
        dots.encode(shape=alt.Shape("way:N", scale=shapes, legend=None), tooltip=hints),
    ]
    return alt.LayerChart(layer=layers, width="container", height=HEIGHT)


def describe(facts: Mapping[str, Any]) -> list[str | list[tuple[str, ...]]]:
    """Two tables: plans by the number of workers, and plans by the batch size."""
    rows, by_batch = ([ScaledPlan(**row) for row in facts[key]] for key in ("rows", "batches"))
    fitting = [row for row in by_batch if row.seconds is not None]
    cells = [(f"{row.batch:,}", row.way, *row.cells[3:4], *row.cells[5:7], row.cells[8]) for row in fitting]
    missing = facts["goodput_needs"]
    return [
        table(rows),
        *(["", f"for goodput under failures give {needs(missing)}"] if missing else []),
        "",
        f"against the batch, on {by_batch[0].workers:,} workers",
        [("batch", "way", "plan", "a step", "examples/s", "utilisation"), *cells],
        f"drawn in {facts['page']}",
    ]
