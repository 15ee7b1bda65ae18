"""The variables of the page's template: all texts and charts are made here, so that the template has markup only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from altair.utils.schemapi import debug_mode

from stretto.report import (
    clock,
    cures,
    frontier,
    large_batches,
    learning_curves,
    measures,
    prediction,
    speedup,
    timeline,
    tuning,
    units,
)
from stretto.report.charts import ChartSpecs, checked
from stretto.report.metric import VALIDATION_ACCURACY, VALIDATION_BLEU, Metric, metrics_of, own_metrics
from stretto.report.page import ACCOUNTINGS, Page, as_toml, runs_told, time_told
from stretto.report.palette import Style, styles
from stretto.report.panel import panels
from stretto.report.record import Record, methods, several_devices
from stretto.report.speedup import baseline
from stretto.report.summary import MethodSummary, summarize
from stretto.report.verdict import sentences

Column = tuple[str, Callable[[float | None], str]]
COLUMNS: Mapping[str, Column] = {  # of the table of all runs: its head, and how a value is written
    "train_loss": ("train loss", units.number),
    "train_accuracy": ("train acc.", units.percent),
    "validation_loss": ("val. loss", units.number),
    "validation_accuracy": ("val. acc.", units.percent),
    "validation_bleu": ("val. BLEU", units.bleu),
    "test_loss": ("test loss", units.number),
    "test_accuracy": ("test acc.", units.percent),
    "test_bleu": ("test BLEU", units.bleu),
    "serial_flops": ("serial", units.flops),
    "total_flops": ("total", units.flops),
    "seconds": ("seconds", units.seconds),
}


@debug_mode(False)  # each chart's own test checks it against Vega-Lite's schema, which takes half of the time
def view(page: Page) -> dict[str, Any]:
    """All variables of page.html.j2: `specs` holds the charts, everything else is text or plain data."""
    records, specs = page.records, ChartSpecs()
    names = methods(records)
    look = styles(names)
    own, summaries = own_metrics(records), summarize(records)
    by_metric = [(metric, panels(records, metric)) for metric in metrics_of(records)]
    curves = learning_curves.section(summaries, look, specs)
    return {
        "title": page.title,
        "verdict": sentences(records)[-1:] if page.single else sentences(records),  # the last one is on the run itself
        "single": _single(page, curves, look, specs),
        "facts": _facts(page),
        "several_devices": several_devices(records),
        "in_short": _in_short(page),
        "unfinished": _unfinished(page),
        "first": None if page.single else _first(page, look, specs),
        "legend": [{"method": name, "style": look[name]} for name in names],
        "frontiers": [
            frontier.section(metric, cutoffs, look, specs)
            for metric, cutoffs in by_metric
            if _is_measured(records, metric) and not page.single
        ],
        "speedups": [speedup.section(metric, cutoffs, names) for metric, cutoffs in by_metric if cutoffs],
        "clocks": [clock.section(metric, cutoffs, names, look, specs) for metric, cutoffs in by_metric if cutoffs]
        if page.processes
        else [],
        "baseline": baseline(names),
        "methods": [_summary(summary, own) for summary in summaries],
        "own": [metric.label for metric in own],
        "measures": measures.section(summaries, page.own_options, page.tariffs, emulated=not page.processes),
        "judged_by": summaries[0].metric.label if summaries else "",
        "has_accuracy": _is_measured(records, VALIDATION_ACCURACY),
        "has_bleu": _is_measured(records, VALIDATION_BLEU),
        "curves": [place for place in curves if not (page.single and place.endswith(BY_STEP))],
        "cures": cures.section(page, summaries, look, specs),
        "large_batches": large_batches.section(records, look, specs),
        "curve_notes": [learning_curves.configuration_note(summary) for summary in summaries],
        "tuning": [] if page.single else tuning.section(records, look, specs),
        "failed": [_failed(record) for record in records if record.failed],
        "pictures": [(name, checked(svg, name)) for name, svg in page.pictures.items()],
        "timelines": timeline.section(page.timelines, specs),
        "predicted": [prediction.section(run, index, specs) for index, run in enumerate(page.predicted)],
        "page": page,
        "settings": as_toml(page.settings),
        "runs": _runs(records),
        "specs": specs.to_json(),
    }


BY_STEP = "-step"  # ends the places of curves against the step


def _single(page: Page, curves: Sequence[str], look: Mapping[str, Style], specs: ChartSpecs) -> dict[str, Any] | None:
    """The first section of the page of a single run: its curves and its speed; None for a study."""
    run = page.single
    if run is None:
        return None
    speed = specs.add("speed", learning_curves.speed_chart(run, look[run.method]))
    charts = [place for place in (*curves, speed) if place is not None and place.endswith((BY_STEP, "speed"))]
    return {"charts": charts, "facts": _speed(page, run)}


def _speed(page: Page, run: Record) -> list[tuple[str, str]]:
    last = run.points[-1] if run.points else None
    where = f"{page.processes} processes" if page.processes else "one process for all workers"
    facts = [
        ("A step", units.duration(run.seconds_per_step) if run.seconds_per_step else ""),
        ("Examples a second", units.number(last.examples / last.seconds) if last and last.seconds else ""),
        ("Trained", f"{last.step:,} steps, {last.examples:,} examples, {units.seconds(last.seconds)}" if last else ""),
        ("Device", ", ".join(filter(None, (run.device, where)))),
        *(("Workers compute", f"{units.percent(each.measured.busy, 0)} of the time") for each in page.timelines),
    ]
    return [(name, text) for name, text in facts if text]


def _is_measured(records: Sequence[Record], metric: Metric) -> bool:
    return any(metric.at(point) is not None for record in records for point in record.points)


def _facts(page: Page) -> list[tuple[str, str]]:
    records = page.records
    seeds = sorted({record.seed for record in records})
    counted = f"{len(records)} of {page.planned}" if len(records) < page.planned else f"{len(records)}"
    facts = [
        ("Size", page.heading.size if page.heading else ""),
        ("Model", page.model),
        ("Data", page.dataset),
        ("Runs", f"{counted}; {_failures(records)}" if records else counted),
        ("Seeds", f"{len(seeds)}" if seeds else ""),
        ("Swept", _swept(records)),
        ("Batch norms", page.norms_note),
        ("Compute", f"{ACCOUNTINGS[page.accounting]} ({page.accounting} accounting)"),
    ]
    return [(name, text) for name, text in facts if text]


def _failures(records: Sequence[Record]) -> str:
    diverged, stuck = (sum(flags) for flags in zip(*((r.diverged, r.learned_nothing) for r in records), strict=True))
    told = [f"{diverged or 'none'} diverged"] + [f"{stuck} learned nothing"] * (stuck > 0)
    return ", ".join(told)


def _in_short(page: Page) -> str:
    """What was run, in a line: the model, the data and the number of runs."""
    runs = f"{len(page.records)} run{'s' * (len(page.records) != 1)}"
    return "; ".join(text for text in (page.model.partition(";")[0], page.dataset.partition(": ")[0], runs) if text)


def _unfinished(page: Page) -> dict[str, Any] | None:
    """What the page of an unfinished study says about it, and when to load it again; None if all runs are there."""
    progress = page.progress
    if progress is None and len(page.records) == page.planned:
        return None
    runs = runs_told(len(page.records), page.planned)
    if progress is None:
        return {"runs": runs}
    return {
        "runs": runs,
        "left": time_told(progress.seconds_left),
        "percent": units.percent(progress.share, 0),
        "reload": round(progress.reload),
        "written": round(progress.written),
        "mark": f"{len(page.records)}/{page.planned}",
    }


def _first(page: Page, look: Mapping[str, Style], specs: ChartSpecs) -> dict[str, Any] | None:
    """The frontier that stands first, with the names of its pictures; None if no run got better than it began."""
    panel = speedup.first_panel(page.records)
    if panel is None:
        return None
    place = specs.add("frontier-first", frontier.frontier_chart(panel, look, height=340))
    return {
        "goal": panel.goal,
        "missing": ", ".join(panel.missing),
        "lost": frontier.lost(panel),
        "place": place,
        "pictures": [frontier.SVG, frontier.PNG] if place and not page.progress else [],
    }


def _swept(records: Sequence[Record]) -> str:
    values: dict[str, list[Any]] = {}
    for record in records:
        for name, value in record.options.items():
            known = values.setdefault(name, [])
            if value not in known:
                known.append(value)
    return "; ".join(
        f"{name} {', '.join(str(value) for value in _ordered(known))}"
        for name, known in values.items()
        if len(known) > 1
    )


def _ordered(values: list[Any]) -> list[Any]:
    return sorted(values) if all(isinstance(value, int | float) for value in values) else values


def _summary(summary: MethodSummary, own: Sequence[Metric]) -> dict[str, Any]:
    is_share, near = summary.metric is VALIDATION_ACCURACY, summary.near_best
    spread = (lambda value: units.percent(value, 2)) if is_share else units.number
    return {
        "method": summary.method,
        "diverged": units.percent(summary.diverged_share, 0),
        "diverged_of": f"{summary.diverged} of {summary.runs}",
        "stuck": f"{summary.learned_nothing}",
        "runs": f"{summary.runs}",
        "own": [(units.number(value), units.number(test)) for value, test in _own_values(summary, own)],
        "train_loss": units.number(summary.best_train_loss),
        "validation_loss": units.number(summary.best_validation_loss),
        "validation_accuracy": units.percent(summary.best_validation_accuracy),
        "test_loss": units.number(summary.test_loss),
        "test_accuracy": units.percent(summary.test_accuracy),
        "test_bleu": units.bleu(summary.test_bleu),
        "serial": units.flops(summary.serial_flops),
        "total": units.flops(summary.total_flops),
        "seconds": units.seconds(summary.seconds),
        "near": units.percent(near, 0),
        "near_of": "" if near is None else f"{round(near * summary.configurations)} of {summary.configurations}",
        "spread": "n/a" if summary.spread is None else spread(summary.spread),
        "median_spread": "n/a" if summary.median_spread is None else spread(summary.median_spread),
        "chosen": f"{summary.chosen.option_text}, seed {summary.chosen.seed}" if summary.chosen else "no run to choose",
    }


def _own_values(summary: MethodSummary, own: Sequence[Metric]) -> list[tuple[float | None, float | None]]:
    """The user's metrics of the chosen run, each on validation and on test data."""
    run = summary.chosen
    return [(metric.final(run), run.test_metrics.get(metric.name)) if run else (None, None) for metric in own]


def _failed(record: Record) -> dict[str, str]:
    last = record.points[-1] if record.points else None
    return {
        "method": record.method,
        "options": record.option_text,
        "seed": f"{record.seed}",
        "outcome": record.outcome,
        "train": "none" if last is None else f"{units.number(last.train_loss)} at step {last.step}",
        "first": units.number(record.points[0].validation_loss) if record.points else units.NONE,
        "validation": units.number(last.validation_loss) if last is not None else units.NONE,
    }


def _runs(records: Sequence[Record]) -> dict[str, Any]:
    """The table of all runs: heads, and for each cell its text and the value that it is sorted by."""
    options = list(dict.fromkeys(name for record in records for name in record.options))
    columns = {name: COLUMNS[name] for name in COLUMNS if "bleu" not in name or _has_value(records, name)}
    own = [metric.name for metric in own_metrics(records)]
    yours = [head for name in own for head in (f"val. {name}", f"test {name}")]
    heads = ["run", "method", *options, "seed", "status", *(head for head, _ in columns.values()), *yours]
    return {"heads": heads, "rows": [_run(record, options, columns, own) for record in records]}


def _has_value(records: Sequence[Record], name: str) -> bool:
    return any(getattr(record, name) is not None for record in records)


def _run(
    record: Record, options: Sequence[str], columns: Mapping[str, Column], own: Sequence[str]
) -> list[tuple[str, Any]]:
    swept = [record.options.get(name) for name in options]
    plain = [record.id, record.method, *swept, record.seed]
    cells = [(units.NONE if value is None else str(value), value) for value in plain]
    cells.append((record.outcome, record.outcome))
    cells += [(form(getattr(record, name)), getattr(record, name)) for name, (_, form) in columns.items()]
    yours = [split.get(name) for name in own for split in (record.metrics, record.test_metrics)]
    cells += [(units.number(value), value) for value in yours]
    return [(text, "" if value is None else value) for text, value in cells]
