"""From runs to the strings and charts that the template places: no markup here, no arithmetic there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from stretto.report import units
from stretto.report.charts.clock import clock_chart
from stretto.report.charts.curves import curve_charts
from stretto.report.charts.frontier import frontier_chart
from stretto.report.charts.predicted import predicted_chart
from stretto.report.charts.tuning import RATE, tuning_charts
from stretto.report.clock import Clocked, clocked
from stretto.report.cures import cures
from stretto.report.large_batches import large_batches
from stretto.report.metric import METRICS, VALIDATION_ACCURACY, VALIDATION_BLEU, Metric
from stretto.report.page import ACCOUNTINGS, Page
from stretto.report.palette import Style, styles
from stretto.report.panel import Panel, panels
from stretto.report.picture import checked
from stretto.report.predicted import Compared, Predicted, typical_error
from stretto.report.record import Record, methods
from stretto.report.settings import as_toml
from stretto.report.speedup import Speedup, baseline, speedups
from stretto.report.summary import MethodSummary, summarize
from stretto.report.timeline import section
from stretto.report.verdict import verdict

PURPOSE = {
    "train_loss": "How soon the network fits its training data.",
    "train_accuracy": "The same, counted in right answers.",
    "validation_loss": "How soon it does well on data it has not seen.",
    "validation_accuracy": "The same, counted in right answers.",
    "validation_bleu": "How near its translations come to those that are wanted.",
}

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


@dataclass
class Specs:
    """The charts of a page by the id of their place, with the data that several share stored once."""

    charts: dict[str, Any] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)

    def add(self, place: str, chart: alt.LayerChart | None) -> str | None:
        """Keep a chart and return its place; None stays None."""
        if chart is None:
            return None
        spec = chart.to_dict(validate=False)
        self.datasets.update(spec.pop("datasets", {}))
        spec.pop("config", None)  # the page has a light and a dark one
        self.charts[place] = spec
        return place


@debug_mode(False)  # each chart's own test checks it against Vega-Lite's schema, which takes half of the time
def view(page: Page) -> dict[str, Any]:
    """All variables of the template. `specs` holds the charts, everything else is text."""
    records, specs = page.records, Specs()
    names = methods(records)
    look = styles(names)
    found = [(metric, panels(records, metric)) for metric in METRICS]
    summaries = summarize(records)
    return {
        "title": page.title,
        "verdict": verdict(records),
        "facts": _facts(page),
        "legend": [{"method": name, "style": look[name]} for name in names],
        "frontiers": [_frontier(metric, each, look, specs) for metric, each in found if _is_measured(records, metric)],
        "speedups": [_speedups(metric, each, names) for metric, each in found if each],
        "clocks": [_clock(metric, each, names, look, specs) for metric, each in found if each]
        if page.processes
        else [],
        "baseline": baseline(names),
        "methods": [_summary(each) for each in summaries],
        "judged_by": summaries[0].metric.label if summaries else "",
        "has_accuracy": _is_measured(records, VALIDATION_ACCURACY),
        "has_bleu": _is_measured(records, VALIDATION_BLEU),
        "curves": _curves(summaries, look, specs),
        "cures": cures(page, summaries, look, specs.add),
        "large_batches": large_batches(records, look, specs.add),
        "curve_notes": [_configuration(each) for each in summaries],
        "tuning": [
            {"method": name, "place": specs.add(f"tuning-{index}", chart)}
            for index, (name, chart) in enumerate(tuning_charts(records, look).items())
        ],
        "rate": RATE,
        "diverged": [_diverged(record) for record in records if record.diverged],
        "pictures": [(name, checked(svg, name)) for name, svg in page.pictures.items()],
        "timelines": section(page.timelines, specs.add),
        "predicted": [_predicted(each, index, specs) for index, each in enumerate(page.predicted)],
        "page": page,
        "settings": as_toml(page.settings),
        "runs": _runs(records),
        "specs": {"charts": specs.charts, "datasets": specs.datasets},
    }


def _is_measured(records: Sequence[Record], metric: Metric) -> bool:
    return any(metric.at(point) is not None for record in records for point in record.points)


def _facts(page: Page) -> list[tuple[str, str]]:
    records = page.records
    seeds = sorted({record.seed for record in records})
    diverged = sum(record.diverged for record in records)
    counted = f"{len(records)} of {page.planned}" if len(records) < page.planned else f"{len(records)}"
    facts = [
        ("Size", page.heading.size if page.heading else ""),
        ("Model", page.model),
        ("Data", page.dataset),
        (
            "Runs",
            f"{counted}; {diverged} diverged" if diverged else f"{counted}; none diverged" if records else counted,
        ),
        ("Seeds", f"{len(seeds)}" if seeds else ""),
        ("Swept", _swept(records)),
        ("Compute", f"{ACCOUNTINGS[page.accounting]} ({page.accounting} accounting)"),
    ]
    return [(name, text) for name, text in facts if text]


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


def _frontier(metric: Metric, found: Sequence[Panel], look: Mapping[str, Style], specs: Specs) -> dict[str, Any]:
    return {
        "label": metric.label,
        "purpose": PURPOSE[metric.name],
        "panels": [
            {
                "goal": _goal(metric, panel.cutoff),
                "missing": ", ".join(panel.missing),
                "place": specs.add(f"frontier-{metric.name}-{index}", frontier_chart(panel, look)),
            }
            for index, panel in enumerate(found)
        ],
    }


def _goal(metric: Metric, cutoff: float) -> str:
    sign = "≥" if metric.higher else "≤"
    return f"{metric.label} {sign} {units.cutoff(cutoff, metric.is_share)}"


def _speedups(metric: Metric, found: Sequence[Panel], names: Sequence[str]) -> dict[str, Any]:
    rows = []
    for panel in found:
        entries = speedups(panel, names)
        best = max((each.serial for each in entries if each.serial is not None), default=None)
        rows.append({"goal": _goal(metric, panel.cutoff), "cells": [_speedup(each, best, names) for each in entries]})
    return {"label": metric.label, "rows": rows}


def _speedup(entry: Speedup, best: float | None, names: Sequence[str]) -> dict[str, Any]:
    if entry.arrival is None:
        return {"head": "not reached", "lines": [], "best": False, "missing": True}
    point = entry.arrival.point
    costs = [f"{units.flops(point.serial_flops)} serial", f"{units.flops(point.total_flops)} total"]
    costs += ["diverged later"] * entry.arrival.record.diverged
    if entry.serial is None or entry.method == baseline(names):
        reference = entry.method == baseline(names)
        head = "1×" if reference else units.flops(point.serial_flops)
        lines = ["1× the total", *costs] if reference else ["serial", *costs[1:]]
        return {"head": head, "lines": lines, "best": entry.serial == best is not None, "missing": False}
    return {
        "head": units.times(entry.serial),
        "lines": [f"{units.times(entry.total)} the total", *costs],
        "best": entry.serial == best,
        "missing": False,
    }


def _clock(
    metric: Metric, found: Sequence[Panel], names: Sequence[str], look: Mapping[str, Style], specs: Specs
) -> dict[str, Any]:
    entries = {_goal(metric, panel.cutoff): clocked(panel, names) for panel in found}
    rows = []
    for goal, row in entries.items():
        soonest = min((each.arrival.point.seconds for each in row if each.arrival is not None), default=None)
        rows.append({"goal": goal, "cells": [_clocked(each, soonest) for each in row]})
    return {"label": metric.label, "rows": rows, "place": specs.add(f"clock-{metric.name}", clock_chart(entries, look))}


def _clocked(entry: Clocked, soonest: float | None) -> dict[str, Any]:
    if entry.arrival is None:
        return {"head": "not reached", "lines": [], "best": False, "missing": True}
    point = entry.arrival.point
    lines = (
        [f"step {point.step}"] if entry.times is None else [f"{units.times(entry.times)} as soon", f"step {point.step}"]
    )
    return {"head": units.seconds(point.seconds), "lines": lines, "best": point.seconds == soonest, "missing": False}


def _summary(summary: MethodSummary) -> dict[str, str]:
    is_share, near = summary.metric is VALIDATION_ACCURACY, summary.near_best
    spread = (lambda value: units.percent(value, 2)) if is_share else units.number
    return {
        "method": summary.method,
        "diverged": units.percent(summary.diverged_share, 0),
        "diverged_of": f"{summary.diverged} of {summary.runs}",
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
        "chosen": f"{summary.chosen.option_text}, seed {summary.chosen.seed}" if summary.chosen else "no finished run",
    }


def _curves(summaries: Sequence[MethodSummary], look: Mapping[str, Style], specs: Specs) -> list[str]:
    charts = curve_charts(summaries, look)
    return [place for name, chart in charts.items() if (place := specs.add(f"curve-{name}", chart))]


def _configuration(summary: MethodSummary) -> str:
    if not summary.best_configuration:
        return f"{summary.method}: no finished run, so no curve"
    count = len(summary.best_configuration)
    options = summary.best_configuration[0].option_text or "its only configuration"
    return f"{summary.method}: {options} ({count} seed{'s' if count > 1 else ''})"


def _diverged(record: Record) -> dict[str, str]:
    last = record.points[-1] if record.points else None
    return {
        "method": record.method,
        "options": record.option_text,
        "seed": f"{record.seed}",
        "step": units.NONE if record.diverged_at is None else f"{record.diverged_at}",
        "last": "none" if last is None else f"{units.number(last.train_loss)} at step {last.step}",
    }


def _predicted(each: Predicted, index: int, specs: Specs) -> dict[str, Any]:
    errors = sorted(abs(error) for error in each.errors)
    return {
        "method": each.method,
        "run": each.run,
        "source": each.source,
        "emulated": each.emulated,
        "place": specs.add(f"predicted-{index}", predicted_chart(each)),
        "steps": len(errors),
        "mean": units.percent(typical_error(each)),
        "median": units.percent(errors[len(errors) // 2]),
        "worst": units.percent(errors[-1]),
        "rows": [_compared(row) for row in each.rows],
    }


def _compared(row: Compared) -> dict[str, str]:
    forms: dict[str, Callable[[float], str]] = {"s": units.duration, "B": units.bytes_held, "": "{:g}".format}
    form = forms[row.unit]
    known = [units.NONE if value is None else form(value) for value in (row.measured, row.predicted)]
    error = units.NONE if row.error is None else f"{100 * row.error:+.1f} %"
    return {"name": row.name, "measured": known[0], "predicted": known[1], "error": error}


def _runs(records: Sequence[Record]) -> dict[str, Any]:
    """Fill the table of all runs: heads, and for each cell its text and the value it is sorted by."""
    options = list(dict.fromkeys(name for record in records for name in record.options))
    columns = {name: COLUMNS[name] for name in COLUMNS if "bleu" not in name or _has(records, name)}
    heads = ["run", "method", *options, "seed", "status", *(head for head, _ in columns.values())]
    return {"heads": heads, "rows": [_run(record, options, columns) for record in records]}


def _has(records: Sequence[Record], name: str) -> bool:
    return any(getattr(record, name) is not None for record in records)


def _run(record: Record, options: Sequence[str], columns: Mapping[str, Column]) -> list[tuple[str, Any]]:
    swept = [record.options.get(name) for name in options]
    plain = [record.id, record.method, *swept, record.seed]
    status = f"diverged at {record.diverged_at}" if record.diverged else record.status
    cells = [(units.NONE if value is None else str(value), value) for value in plain]
    cells.append((status, status))
    cells += [(form(getattr(record, name)), getattr(record, name)) for name, (_, form) in columns.items()]
    return [(text, "" if value is None else value) for text, value in cells]
