"""The energy and the money that a run took to its best evaluation: measured, or from the power and price of devices."""

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.report.record import Point, Record


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
