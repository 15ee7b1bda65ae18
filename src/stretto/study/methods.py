"""The methods of a study: those that are named, and for `all` every other one that can run on its settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from stretto.errors import ScheduleError, UsageError
from stretto.methods import BASELINE, METHODS, Method, method
from stretto.methods.advice import explained, refusal
from stretto.methods.cure import Correction, Place, Prediction
from stretto.methods.table import is_advised
from stretto.settings.runs import CompareSettings
from stretto.study.first_batches import refuse_other_sizes
from stretto.study.first_evaluation import refuse_evaluation
from stretto.study.prepare import Prepared, advice_in, prepare_trial, resolve, with_optimizer, written

ALL = "all"
NOT_COMPARED = ("name", "summary", "options", "planning", "advice")  # fields of a method: it does the same


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
        refuse_misfits(resolved, by_name(advice_in(settings, resolved)))
        return ChosenMethods(resolved, {})
    resolved = resolve(replace(settings, methods=named or (BASELINE,)))
    advice, behaviors = advice_in(settings, resolved), dict[str, Any]()
    advised = by_name(advice)
    for name in resolved.methods if named else ():
        with explained(advised.get(name, method(name))):
            behaviors[name] = behavior(attempt(resolved, name))
    added, left_out = others(resolved, behaviors)
    if not named and not added:
        raise UsageError(f"no method can run on these settings: {next(iter(left_out.values()))}")
    order = tuple(in_order(settings.methods, advice, added))
    return ChosenMethods(resolve(replace(resolved, methods=order)), left_out)


def by_name(advice: Mapping[str, Method]) -> dict[str, Method]:
    """What "async" and "local" stand for, by the names that settings have for it."""
    return {str(chosen): chosen for chosen in advice.values()}


def refuse_misfits(settings: CompareSettings, advice: Mapping[str, Method]) -> None:
    """Raise UsageError, which names every method of the settings that cannot train on them, with the reason.

    A reason that is not a method's own, as it holds for the first two alike, is said alone and at once. `advice` has
    the methods that "async" and "local" stand for.
    """
    misfits = dict[str, list[str]]()  # reason: methods
    for index, name in enumerate(settings.methods):
        try:
            attempt(settings, name)
        except (UsageError, ScheduleError) as error:
            misfits.setdefault(str(error), []).append(name)
            alone = len(settings.methods) == 1 and not advice
            if alone or (index == 1 and len(misfits[str(error)]) == 2):
                raise
    if misfits:
        raise UsageError("\n".join(misfit(names, reason, advice) for reason, names in misfits.items()))


def misfit(names: Sequence[str], reason: str, advice: Mapping[str, Method]) -> str:
    """A line on methods that cannot train, and why."""
    if len(names) == 1 and names[0] in advice:
        return refusal(advice[names[0]], reason)
    return f"{', '.join(names)}: {reason}"


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


def in_order(asked: tuple[str, ...], advice: Mapping[str, Method], added: list[str]) -> Iterator[str]:
    """The methods in the order in which they were asked for, with those added for `all` in its place.

    What "async" and "local" stand for counts once.
    """
    advised, yielded = by_name(advice), set[str]()
    for name in asked:
        if name == ALL:
            yield from added
            continue
        chosen = str(advice.get(name) or written(name))
        if chosen not in advised or chosen not in yielded:
            yielded.add(chosen)
            yield chosen


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
