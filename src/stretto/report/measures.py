"""The measures of a method in one table: how soon it is at its best, how much there is to tune, how steady it is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.report import units
from stretto.report.metric import VALIDATION_ACCURACY, Metric
from stretto.report.record import Point, Record
from stretto.report.summary import MethodSummary


@dataclass(frozen=True, kw_only=True)
class Tariff:
    """What all workers of a run take together, on the cluster that `cluster` names.

    `watts` and `price_per_hour` are None where the cluster's file has none for one of their devices. `seconds_per_step`
    is predicted on that cluster; None for a run on processes, whose seconds were measured.
    """

    cluster: str
    watts: float | None = None
    price_per_hour: float | None = None
    seconds_per_step: float | None = None

    @property
    def hours(self) -> str:
        """In words, what power and price are multiplied by."""
        measured = self.seconds_per_step is None
        return "its seconds by the clock" if measured else "the seconds that its steps are predicted to take there"


@dataclass(frozen=True)
class Expenses:
    """Energy in joules and money up to an evaluation, None where nothing is known, and where each figure is from."""

    joules: float | None = None
    money: float | None = None
    energy_source: str = ""
    money_source: str = ""


def expenses(record: Record, point: Point, tariff: Tariff | None, *, emulated: bool = False) -> Expenses:
    """What a run took up to one of its evaluations. A measured energy comes before a computed one.

    Not that of an `emulated` run: of one device, it comes after what workers of its own would take.
    """
    seconds = None
    if tariff is not None:
        per_step = tariff.seconds_per_step
        seconds = point.seconds if per_step is None else per_step * point.step
    watts = None if tariff is None else tariff.watts
    price = None if tariff is None else tariff.price_per_hour
    joules, energy_source, money, money_source = point.joules, "", None, ""
    if tariff is not None and watts is not None and seconds is not None and (emulated or joules is None):
        joules, energy_source = watts * seconds, f"{watts:g} W on {tariff.cluster}, times {tariff.hours}"
    elif joules is not None:
        of_one = ", of one device that did the work of all workers" * emulated
        energy_source = f"measured ({record.energy_source}{of_one})"
    if tariff is not None and price is not None and seconds is not None:
        money = price * seconds / 3600
        money_source = f"{price:g} an hour on {tariff.cluster}, times {tariff.hours}"
    return Expenses(joules, money, energy_source, money_source)


def by_source(named: Iterable[tuple[str, str]]) -> list[str]:
    """Sources in words, of (method, source): each with its methods, if there are several. Empty ones are left out."""
    methods: dict[str, list[str]] = {}
    for method, source in named:
        if source:
            methods.setdefault(source, []).append(method)
    if len(methods) == 1:
        return list(methods)
    return [f"{source}: {', '.join(names)}" for source, names in methods.items()]


def section(
    summaries: Sequence[MethodSummary],
    own_options: Mapping[str, Sequence[str]],
    tariffs: Mapping[str, Tariff] | None = None,
    *,
    emulated: bool = True,
) -> dict[str, Any] | None:
    """The table, its `rows` one a method; None without methods.

    `own_options` are the options of each method itself, where known; `tariffs` what the workers of its best run take.
    It has a column for energy, and for money, if any method has a figure; `sources` say where these are from.
    """
    if not summaries:
        return None
    spent = {
        summary.method: _expenses(summary, (tariffs or {}).get(summary.method), emulated=emulated)
        for summary in summaries
    }
    return {
        "rows": [_row(summary, own_options.get(summary.method), spent[summary.method]) for summary in summaries],
        "energy": any(each.joules is not None for each in spent.values()),
        "money": any(each.money is not None for each in spent.values()),
        "energy_sources": by_source((method, each.energy_source) for method, each in spent.items()),
        "money_sources": by_source((method, each.money_source) for method, each in spent.items()),
    }


def _expenses(summary: MethodSummary, tariff: Tariff | None, *, emulated: bool) -> Expenses:
    point = None if summary.chosen is None else best_point(summary.chosen, summary.metric)
    if summary.chosen is None or point is None:
        return Expenses()
    return expenses(summary.chosen, point, tariff, emulated=emulated)


def best_point(record: Record, metric: Metric) -> Point | None:
    """The run's best evaluation, of equals the first; None if it has no value of the metric."""
    valued = [(value, point) for point in record.points if (value := metric.at(point)) is not None]
    return min(valued, key=lambda item: metric.cost(item[0]))[1] if valued else None


def _row(summary: MethodSummary, own: Sequence[str] | None, spent: Expenses) -> dict[str, Any]:
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
        "energy": units.energy(spent.joules),
        "money": units.number(spent.money),
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
