"""The measures of a method in one table: how soon it is at its best, how much there is to tune, how steady it is."""

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.report import units
from stretto.report.metric import VALIDATION_ACCURACY, Metric
from stretto.report.record import Point, Record
from stretto.report.summary import MethodSummary


def section(summaries: Sequence[MethodSummary], own_options: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """The rows of the table, one a method; `own_options` are the options of each method itself, where known."""
    return [_row(summary, own_options.get(summary.method)) for summary in summaries]


def best_point(record: Record, metric: Metric) -> Point | None:
    """The run's best evaluation, of equals the first; None if it has no value of the metric."""
    valued = [(value, point) for point in record.points if (value := metric.at(point)) is not None]
    return min(valued, key=lambda item: metric.cost(item[0]))[1] if valued else None


def _row(summary: MethodSummary, own: Sequence[str] | None) -> dict[str, Any]:
    is_accuracy = summary.metric is VALIDATION_ACCURACY
    form = units.percent if is_accuracy else units.number
    point = None if summary.chosen is None else best_point(summary.chosen, summary.metric)
    value = None if point is None else summary.metric.at(point)
    return {
        "method": summary.method,
        "best": form(value),
        "test": form(summary.test_accuracy if is_accuracy else summary.test_loss),
        "serial": units.NONE if point is None else units.flops(point.serial_flops),
        "range": _range_of_costs(summary),
        "total": units.NONE if point is None else units.flops(point.total_flops),
        "seconds": units.NONE if point is None else units.seconds(point.seconds),
        "step": "" if point is None or summary.chosen is None else _step(point, summary.chosen),
        **_options(summary, own),
        "spread": "n/a" if summary.spread is None else _spread(summary.spread, is_accuracy),
        "failed": f"{summary.failed} of {summary.runs}",
    }


def _step(point: Point, record: Record) -> str:
    return f"step {point.step} of {record.points[-1].step}"


def _range_of_costs(summary: MethodSummary) -> str:
    """The serial compute to the best evaluation of each seed of the best configuration, least to most."""
    runs = [record for record in summary.best_configuration if not record.failed]
    costs = [point.serial_flops for run in runs if (point := best_point(run, summary.metric)) is not None]
    if len(costs) < 2:
        return ""
    return f"{units.span(min(costs), max(costs), units.flops)} over {len(costs)} seeds"


def _options(summary: MethodSummary, own: Sequence[str] | None) -> dict[str, str]:
    """How many options there are to tune, and their names: the run's, such as lr, and the method's own."""
    shared = [] if not summary.best_configuration else list(summary.best_configuration[0].options)
    shared = shared or ["lr", "batch_size"]
    if own is None:
        return {"options": f"{len(shared)} or more", "names": ", ".join([*shared, "its own are not known"])}
    return {"options": f"{len(shared) + len(own)}", "names": ", ".join([*shared, *own])}


def _spread(value: float, is_accuracy: bool) -> str:
    return units.percent(value, 2) if is_accuracy else units.number(value)
