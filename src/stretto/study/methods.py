"""Which methods a study trains: those that are named, and for `all` every other one that can run on its settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stretto.errors import ScheduleError, UsageError
from stretto.methods import METHODS
from stretto.methods.cure import Correction, Place, Prediction
from stretto.settings.runs import CompareSettings, known
from stretto.study.prepare import Prepared, prepare, resolve, with_optimizer

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
    if named == settings.methods:
        resolved = resolve(with_optimizer(settings, named))
        for name in resolved.methods:
            attempt(resolved, name)
        return Choice(resolved, {})
    resolved = resolve(replace(settings, methods=named or ("backprop",)))
    does = {name: essence(attempt(resolved, name)) for name in (resolved.methods if named else ())}
    found, left_out = others(resolved, does)
    if not named and not found:
        raise UsageError(f"no method can run on these settings: {next(iter(left_out.values()))}")
    order = tuple(placed(settings.methods, iter(resolved.methods), found))
    return Choice(resolve(replace(resolved, methods=order)), left_out)


def others(settings: CompareSettings, named: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The methods of the table that can run beside the named ones, and those that are left out, with the reason."""
    does, left_out = dict(named), dict[str, str]()
    for name in METHODS:
        if name in does:
            continue
        try:
            own = essence(attempt(settings, name))
        except (UsageError, ScheduleError) as error:
            left_out[name] = str(error)
            continue
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


def attempt(settings: CompareSettings, name: str) -> Prepared:
    """Prepare a run of a method for every batch size; return one. Raises UsageError where it cannot train."""
    alone = replace(settings, methods=(name,), lr=known(settings.lr)[:1], seeds=1)
    prepared = [prepare(run) for run in alone.runs()]
    return prepared[0]


def essence(prepared: Prepared) -> Any:
    """All that a method does on its stages and workers: equal for two methods that differ in words only.

    Whatever cannot be compared counts as different.
    """
    trainer, momentum = prepared.trainer, known(prepared.settings.momentum)
    chosen = trainer.method
    delays = chosen.delays(trainer.schedule).mean
    places = [Place(stage, len(delays), delay, momentum) for stage, delay in enumerate(delays)]
    apart = (*WORDS, "reach", "schedule", "workers", "cure")
    rest = [getattr(chosen, field.name) for field in fields(chosen) if field.name not in apart]
    cure = [at(places, getattr(chosen.cure, field.name)) for field in fields(chosen.cure)]
    return trainer.schedule, trainer.rules, rest, cure


def at(places: list[Place], cure: Any) -> Any:
    """A part of a cure, as it is on every stage."""
    if isinstance(cure, Prediction):
        return cure.form, [cure.horizon(place) for place in places]
    if isinstance(cure, Correction):
        return "correction", [cure.span(place) for place in places]
    return cure
