"""The table of names: from what a user writes to a method."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

from stretto.errors import ScheduleError, UsageError, nearest
from stretto.methods.cure import STEP_CURES, Correction, Place, Prediction
from stretto.methods.definition import Method, Phases
from stretto.methods.local_updates import chunked, greedy, overlapping, synthetic_gradients
from stretto.methods.pipedream import nesterov, pipedream, pipedream_2bw, pipeoptim, spectrain
from stretto.methods.pipelined_backprop import paci, pb, pb_lwp, pb_lwp_sc, pb_lwpw, pb_sc, pipemare
from stretto.methods.synchronous_pipelines import (
    BASELINE,
    backprop,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from stretto.methods.user_method import checked, csv, own_method
from stretto.options.checks import function, of_kind, shown, whole
from stretto.options.import_object import unknown
from stretto.options.named import parse
from stretto.schedule import Schedule


def recomputing(method: Method, recompute: Any) -> Method:
    """The method with recomputation: None or False for none; True, or the number of stages of a segment.

    Where a policy keeps the weights of a forward (synchronous methods, stash, 2BW) the second forward sees the same
    ones, and training is the same to the last bit. Where it does not, a recompute sees the weights as they then stand,
    and the cures for delay reach it: PipeMare's T2 has it look back as far as its forward lies behind, a prediction
    aims at the version that the forward aimed at. (Ours, after PipeMare, Yang et al. 2021, arXiv 1910.05124, whose own
    formula could not be retrieved.)

    Raises UsageError for anything else, and for a prediction that does not say where a recompute should look.
    """
    if recompute is None or recompute is False:
        return method
    if not isinstance(recompute, int) or recompute < 1:
        raise UsageError(f"{method.name}(recompute={recompute!r}): True, False, or how many stages a segment has")
    cure = replace(method.cure, recompute=recompute_cure(method)) if method.weights == "live" else method.cure
    return replace(method, recompute=recompute, cure=cure)


def recompute_cure(method: Method) -> Prediction | Correction | None:
    """The cure of a recompute that sees other weights than its forward; None for the current weights."""
    forward, backward = method.cure.forward, method.cure.backward
    if isinstance(backward, Correction):
        span = backward.span
        return Correction(lambda place: span(place) - (place.recompute or 0))
    if forward is None:
        return None
    horizon = forward.horizon
    if horizon(Place(0, 9, 9, 0.9)) == horizon(Place(0, 9, 4, 0.9)):
        raise UsageError(
            f"{method}: a recompute runs later than its forward, so its horizon has to follow from the delay: leave "
            "horizon= out, use 'decayed', or keep the weights with stash=True"
        )
    return replace(forward, horizon=lambda place: horizon(place._replace(delay=place.recompute or 0)))


Build = TypeVar("Build", bound=Callable[..., Method])
METHODS: dict[str, Callable[..., Method]] = {
    BASELINE: backprop,
    "greedy": greedy,
    "overlapping": overlapping,
    "chunked": chunked,
    "synthetic-gradients": synthetic_gradients,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
    "paci": paci,
    "pb": pb,
    "pb-sc": pb_sc,
    "pb-lwp": pb_lwp,
    "pb-lwpw": pb_lwpw,
    "pb-lwp-sc": pb_lwp_sc,
    "spectrain": spectrain,
    "pipeoptim": pipeoptim,
    "nesterov": nesterov,
    "pipemare": pipemare,
}


ADVISED = ("async", "local")  # what they stand for is in methods/advice.py
FROM_FILES: dict[str, Callable[..., Method]] = {"csv": csv}  # they need a file: not part of `--methods all`
NAME = re.compile(r"[A-Za-z0-9][\w-]*")
PHASES = ("warmup", "finish")  # options of every asynchronous pipeline


def method(name: str | Method, **options: Any) -> Method:
    """The method called `name`, with its options; also written as one string, `"chunked(chunks=4)"`.

    A method of one's own is named by its function, `path/to/file.py:function` or `package.module:function`, or by the
    name that it was registered under.

    Every method takes `recompute` (`methods/table.py`). Every asynchronous pipeline also takes `warmup` and
    `finish`: minibatches before `warmup` and from `finish` on are trained synchronously.

    Raises UsageError for an unknown name or option (naming the nearest) and for a value out of range.
    """
    if isinstance(name, Method):
        if options:
            raise UsageError(f"{name} is a method already; its options {', '.join(options)} cannot be changed")
        return name
    if not isinstance(name, str):
        raise UsageError(f"method={shown(name)}: give a name, or what stretto.method(name, ...) returns")
    bare, written = parse(name)
    build = builder(bare)
    chosen = {**written, **options}
    accepted = inspect.signature(build).parameters
    built = build(**{key: value for key, value in chosen.items() if key in accepted})
    delayed = built.family == "asynchronous"
    known = [*accepted, "recompute", *PHASES] if delayed else [*accepted, "recompute"]
    for key in chosen:
        if key in PHASES and not delayed:
            what = "is synchronous" if built.synchronous else "has losses of its own on its stages"
            raise UsageError(
                f"method {bare!r} {what}: {key} is for pipelines with stale gradients, such as pb or pipemare"
            )
        if key in STEP_CURES and key not in known:
            why = "is synchronous: there is no delay to cure" if built.synchronous else "does not take it"
            raise UsageError(
                f"method {bare!r} {why}; {key} is for pipedream, pipedream-2bw, pb and paci, whose gradients are stale"
            )
        if key not in known:
            raise UsageError(f"method {bare!r} has no option {key!r}: {nearest(key, known)}")
    phases = Phases(**{key: value for key, value in chosen.items() if key in PHASES})
    named = replace(
        built,
        name=bare,
        phases=phases,
        options={key: chosen[key] for key in known if key in chosen} | dict(built.options),
    )
    return recomputing(named, chosen.get("recompute", False))


def register(name: str) -> Callable[[Build], Build]:
    """Put a method in the table: `@stretto.methods.register("mine")` above the function that returns it.

    Every process has to register it; `path/to/file.py:function` names a method without that. Raises UsageError for a
    name that another function has.
    """
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise UsageError(f"method name {shown(name)}: give letters, digits and hyphens, such as 'my-method'")

    def registered(build: Build) -> Build:
        wanted = "a function with keyword options that returns a stretto.Method"
        function(f"methods.register({name!r})", build, wanted, 0, options=True)
        taken = METHODS.get(name) or FROM_FILES.get(name)
        if taken is not None and identity(taken) != identity(build):
            raise UsageError(f"there is a method {name!r} already, {'.'.join(identity(taken))}: choose another name")
        METHODS[name] = checked(name, build)
        return build

    return registered


def identity(build: Callable[..., Method]) -> tuple[str, str]:
    """A function's module and name, which stay the same when its file, or a notebook's cell, is run again."""
    return str(build.__module__), getattr(build, "__qualname__", type(build).__qualname__)


def builder(name: str) -> Callable[..., Method]:
    """The function behind a method's name: of the table, or of a user's own, `path/to/file.py:function`.

    Raises UsageError where there is none.
    """
    if ":" in name:
        return own_method(name)
    build = METHODS.get(name) or FROM_FILES.get(name)
    if name in ADVISED:
        raise UsageError(
            f"method {name!r} stands for another one, which depends on the optimizer and the number of stages: name "
            f"that one, which stretto.advised({name!r}, 'adamw', 8) tells for AdamW and 8 stages"
        )
    if build is None:
        raise unknown("method", name, [*METHODS, *FROM_FILES, *ADVISED])
    return build


def is_advised(text: object) -> TypeGuard[str]:
    """Whether a method is written as "async" or "local", with or without options."""
    return isinstance(text, str) and text.partition("(")[0].strip() in ADVISED


def check_written(name: str | Method) -> None:
    """Raise UsageError for a method that cannot be read; what "async" and "local" stand for is known later."""
    if is_advised(name):
        parse(name)
    else:
        method(name)


def with_fewer(chosen: Method, most: int, schedule: Schedule) -> Method | None:
    """The method that cuts minibatches into at most `most` micro-batches, by its own option, as many as can be.

    `schedule` is what it has now. None if it has no such option, or cannot take so few on these stages.
    """
    planning = chosen.planning
    if planning is None or planning.cut is None:
        return None
    for count in range(min(most, schedule.per_turn - 1), 0, -1):
        if planning.allows(count, schedule.num_workers):
            try:
                fewer = method(chosen.name, **{**chosen.options, planning.cut: count})
                fewer.homes(schedule.num_stages, schedule.num_workers)
            except (UsageError, ScheduleError):
                return None
            return fewer
    return None


def with_microbatches(chosen: Method, count: int) -> Method:
    """A synchronous method with `count` micro-batches a minibatch, if it has the option and it was not given.

    Any other method is returned unchanged: its turns have their own number of micro-batches, and more micro-batches are
    more turns.
    """
    of_kind("method", chosen, Method, "what stretto.method(name, ...) returns")
    whole("microbatches", count, 1)
    known = chosen.name in METHODS or ":" in chosen.name
    free = known and "microbatches" in inspect.signature(builder(chosen.name)).parameters
    if not chosen.synchronous or not free or chosen.options.get("microbatches") is not None:
        return chosen
    return method(chosen.name, **{**chosen.options, "microbatches": count})
