"""Which methods a study trains: those that are named, and for `all` every other one that can run on its settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stretto.config import CompareSettings, known
from stretto.errors import ScheduleError, UsageError
from stretto.methods import METHODS, Method, method
from stretto.methods.cure import Correction, Place, Prediction
from stretto.study.prepare import prepare, resolve

ALL = "all"
WORDS = ("name", "summary", "options")  # of a method, which make no difference to what it does


@dataclass(frozen=True)
class Choice:
    """The resolved settings, every method by its name, and why some of `all` are not among them."""

    settings: CompareSettings
    left_out: Mapping[str, str]


def choose(settings: CompareSettings) -> Choice:
    """Resolve the settings and try every method. Raises UsageError for what cannot work and is named, or if none can.

    Of `all`, what cannot work is left out, and so is what comes to the same as a method before it.
    """
    named = tuple(name for name in settings.methods if name != ALL)
    resolved = resolve(settings if named == settings.methods else replace(settings, methods=named or ("backprop",)))
    for name in resolved.methods if named else ():
        attempt(resolved, name)
    if named == settings.methods:
        return Choice(resolved, {})
    found, left_out = others(resolved, resolved.methods if named else ())
    if not named and not found:
        raise UsageError(f"no method can run on these settings: {next(iter(left_out.values()))}")
    order = tuple(placed(settings.methods, iter(resolved.methods), found))
    return Choice(resolve(replace(resolved, methods=order)), left_out)


def others(settings: CompareSettings, named: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The methods of the table that can run beside the named ones, and those that are left out, with the reason."""
    does = {name: essence(method(name), settings) for name in named}
    left_out: dict[str, str] = {}
    for name in METHODS:
        if name in does:
            continue
        try:
            attempt(settings, name)
        except (UsageError, ScheduleError) as error:
            left_out[name] = str(error)
            continue
        own = essence(method(name), settings)
        twin = next((other for other, each in does.items() if each == own), None)
        if twin is None:
            does[name] = own
        else:
            left_out[name] = f"the same as {twin} where stages={settings.stages}"
    return [name for name in does if name not in named], left_out


def placed(written: tuple[str, ...], named: Iterator[str], found: list[str]) -> Iterator[str]:
    """The methods in the order in which they were written, those of `all` in its place."""
    for name in written:
        if name == ALL:
            yield from found
        else:
            yield next(named)


def attempt(settings: CompareSettings, name: str) -> None:
    """Make the trainer of a method, for every batch size. Raises UsageError where it cannot train."""
    for run in replace(settings, methods=(name,), lr=known(settings.lr)[:1], seeds=1).runs():
        prepare(run)


def essence(chosen: Method, settings: CompareSettings) -> Any:
    """All that a method does on so many stages and workers: equal for two methods that differ in words only.

    Whatever cannot be compared counts as different.
    """
    stages = known(settings.stages)
    schedule, rules = chosen.plan(stages, settings.workers)
    delays = chosen.delays(schedule).steady
    places = [Place(stage, stages, delay, settings.momentum) for stage, delay in enumerate(delays)]
    apart = (*WORDS, "reach", "schedule", "workers", "cure")
    rest = [getattr(chosen, field.name) for field in fields(chosen) if field.name not in apart]
    return schedule, rules, rest, [at(places, getattr(chosen.cure, field.name)) for field in fields(chosen.cure)]


def at(places: list[Place], cure: Any) -> Any:
    """A part of a cure, as it is on every stage."""
    if isinstance(cure, Prediction):
        return cure.form, [cure.horizon(place) for place in places]
    if isinstance(cure, Correction):
        return "correction", [cure.span(place) for place in places]
    return cure
