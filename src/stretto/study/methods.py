"""The methods of a study: those that are named, and for `all` every other one that can run on its settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stretto.errors import ScheduleError, UsageError
from stretto.methods import BASELINE, METHODS, method
from stretto.methods.cure import Correction, Place, Prediction
from stretto.methods.table import is_advised
from stretto.settings.runs import CompareSettings
from stretto.study.first_batches import refuse_other_sizes
from stretto.study.first_evaluation import refuse_evaluation
from stretto.study.prepare import Prepared, prepare_trial, resolve, with_optimizer

ALL = "all"
NOT_COMPARED = ("name", "summary", "options", "planning")  # fields of a method that do not change what it does


@dataclass(frozen=True)
class ChosenMethods:
    """Resolved settings that name every method, and {method: why it was left out of `all`}."""

    settings: CompareSettings
    left_out: Mapping[str, str]


def choose(settings: CompareSettings) -> ChosenMethods:
    """Resolve the settings and try every method. Raises UsageError if a named method cannot run, or no method can.

    Of `all`, methods that cannot run are left out, and so are those that do the same as a method before them.
    """
    named = tuple(name for name in settings.methods if name != ALL)
    if named == settings.methods:
        resolved = resolve(with_optimizer(settings, [method(name) for name in named if not is_advised(name)]))
        refuse_misfits(resolved)
        return ChosenMethods(resolved, {})
    resolved = resolve(replace(settings, methods=named or (BASELINE,)))
    behaviors = {name: behavior(attempt(resolved, name)) for name in (resolved.methods if named else ())}
    added, left_out = others(resolved, behaviors)
    if not named and not added:
        raise UsageError(f"no method can run on these settings: {next(iter(left_out.values()))}")
    order = tuple(in_order(settings.methods, iter(resolved.methods), added))
    return ChosenMethods(resolve(replace(resolved, methods=order)), left_out)


def refuse_misfits(settings: CompareSettings) -> None:
    """Raise UsageError, which names every method of the settings that cannot train on them, with the reason.

    A reason that is not a method's own, as it holds for the first two alike, is said alone and at once.
    """
    misfits = dict[str, list[str]]()  # reason: methods
    for index, name in enumerate(settings.methods):
        try:
            attempt(settings, name)
        except (UsageError, ScheduleError) as error:
            misfits.setdefault(str(error), []).append(name)
            if len(settings.methods) == 1 or (index == 1 and len(misfits[str(error)]) == 2):
                raise
    if misfits:
        raise UsageError("\n".join(f"{', '.join(names)}: {reason}" for reason, names in misfits.items()))


def others(settings: CompareSettings, named: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The methods of the table, besides the named ones, that can run; and {method: why it is left out}."""
    behaviors, left_out = dict(named), dict[str, str]()
    for name in METHODS:
        if name in behaviors:
            continue
        try:
            own_behavior = behavior(attempt(settings, name))
        except (UsageError, ScheduleError) as error:
            left_out[name] = str(error)
            continue
        same = next((other for other, known in behaviors.items() if known == own_behavior), None)
        if same is None:
            behaviors[name] = own_behavior
        else:
            left_out[name] = f"the same as {same} where stages={settings.stages}"
    return [name for name in behaviors if name not in named], left_out


def in_order(written: tuple[str, ...], named: Iterator[str], added: list[str]) -> Iterator[str]:
    """The named methods in the order in which they were written, with those added for `all` in its place."""
    for name in written:
        if name == ALL:
            yield from added
        else:
            yield next(named)


def attempt(settings: CompareSettings, name: str) -> Prepared:
    """Prepare a run of a method at every batch size and return the first. Raises UsageError if it cannot train."""
    only = replace(settings, methods=(name,), lr=settings.lr and settings.lr[:1], seeds=1)
    prepared = [prepare_trial(run) for run in only.runs()]
    for trial in prepared:
        refuse_other_sizes(trial)
    refuse_evaluation(prepared[0])
    return prepared[0]


def behavior(prepared: Prepared) -> Any:
    """What a method does on its stages and workers: equal for two methods that differ in name and options only.

    Parts that cannot be compared count as different.
    """
    trainer, momentum = prepared.trainer, prepared.settings.momentum or 0.0
    chosen = trainer.method
    delays = chosen.delays(trainer.schedule).mean
    mean = sum(delays) / len(delays)
    places = [Place(stage, len(delays), delay, momentum, None, mean) for stage, delay in enumerate(delays)]
    separate = (*NOT_COMPARED, "reach", "schedule", "workers", "cure")
    rest = [getattr(chosen, field.name) for field in fields(chosen) if field.name not in separate]
    cure = [on_stages(places, getattr(chosen.cure, field.name)) for field in fields(chosen.cure)]
    return trainer.schedule, trainer.rules, rest, cure


def on_stages(places: list[Place], cure: Any) -> Any:
    """A part of a cure, with its values on every stage."""
    if isinstance(cure, Prediction):
        return cure.form, [cure.horizon(place) for place in places]
    if isinstance(cure, Correction):
        return "correction", [cure.span(place) for place in places]
    return [cure(place) for place in places] if callable(cure) else cure
