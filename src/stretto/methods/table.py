"""The table of names: from what a user writes to a method."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard, TypeVar

from stretto.errors import ScheduleError, UsageError, nearest
from stretto.methods.cure import STEP_CURES, Correction, Place, Prediction
from stretto.methods.definition import Method, Phases, whole_network
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
from stretto.options.checks import function, is_number, is_whole, of_kind, shown, whole
from stretto.options.import_object import unknown
from stretto.options.named import parse
from stretto.schedule import Reach, Schedule


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


def supervised(method: Method, *, head: str | None = None, head_weight: float = 1.0, head_at: Any = None) -> Method:
    """The synchronous method with auxiliary heads from which nothing is detached (deep supervision, Lee et al. 2015).

    The gradient is that of the output's loss + `head_weight` times the sum of the heads' losses. They stand behind the
    stages `head_at`, 2 or "1+3"; behind all but the last unless said. Raises UsageError for anything else.
    """
    if head is None and head_at is None and head_weight == 1:
        return method
    if not is_number(head_weight) or not 0 <= head_weight < math.inf:
        raise UsageError(f"{method.name}(head_weight={shown(head_weight)}): a number of 0 or more")
    chosen = None if head_at is None else stages_of(method.name, head_at)

    def reach(num_stages: int) -> Reach:
        last = num_stages - 1
        if chosen and last and chosen[-1] >= last:
            raise UsageError(
                f"{method.name}(head_at={head_at}) on {num_stages} stages: auxiliary heads stand behind stages 0 to "
                f"{last - 1}, the last one has the output"
            )
        own = range(last) if chosen is None else chosen if last else ()
        return Reach(tuple(stage if stage in own or stage == last else None for stage in range(num_stages)))

    planning = method.planning
    if chosen and planning is not None:
        planning = replace(planning, workers=(max(planning.workers[0], chosen[-1] + 2), planning.workers[1]))
    head = "auto" if head is None else head
    return replace(method, reach=reach, head=head, head_weight=float(head_weight), planning=planning)


def stages_of(name: str, at: Any) -> list[int]:
    """The stages of "1+3", or of 2, in their order."""
    texts = [str(at)] if is_whole(at) else at.split("+") if isinstance(at, str) else []
    if not texts or not all(text.strip().isdecimal() for text in texts):
        raise UsageError(f"{name}(head_at={shown(at)}): give a stage, 2, or several, '1+3'")
    return sorted({int(text) for text in texts})


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
SUPERVISION = ("head", "head_weight", "head_at")  # options of every synchronous method


def method(name: str | Method, **options: Any) -> Method:
    """The method called `name`, with its options; also written as one string, `"chunked(chunks=4)"`.

    A method of one's own is named by its function, `path/to/file.py:function` or `package.module:function`, or by the
    name that it was registered under.

    Every method takes `recompute` (`methods/table.py`). Every asynchronous pipeline also takes `warmup` and
    `finish`: minibatches before `warmup` and from `finish` on are trained synchronously. Every synchronous method takes
    `head`, `head_weight` and `head_at`: auxiliary heads whose gradients pass through all stages below.

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
    given = {key: value for key, value in chosen.items() if key in accepted}
    if given.get("inside") is not None:
        given["inside"] = partial(nested, bare, given["inside"])
    built = build(**given)
    delayed = built.family == "asynchronous"
    more = PHASES if delayed else SUPERVISION if built.synchronous and built.reach is whole_network else ()
    known = [*accepted, "recompute", *more]
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
        if key in SUPERVISION and key not in known and not built.synchronous and "head" not in accepted:
            raise UsageError(
                f"method {bare!r} has stale gradients: {key} is for synchronous methods, such as 1f1b, and local ones"
            )
        if key not in known:
            raise UsageError(f"method {bare!r} has no option {key!r}: {nearest(key, known)}")
    if more is SUPERVISION:
        built = supervised(built, **{key: value for key, value in chosen.items() if key in SUPERVISION})
    phases = Phases(**{key: value for key, value in chosen.items() if key in PHASES})
    named = replace(
        built,
        name=bare,
        phases=phases or built.phases,
        options={key: chosen[key] for key in known if key in chosen} | dict(built.options),
    )
    return recomputing(named, chosen.get("recompute", False))


def nested(name: str, inside: object, microbatches: int | None) -> Method:
    """The method inside another one, "pb(spike=True)", with so many micro-batches, if that is given.

    Raises UsageError where both give the number, or it has none.
    """
    if not isinstance(inside, str):
        raise UsageError(f"{name}(inside={shown(inside)}): give a method's name, with options, inside='pb(spike=True)'")
    if microbatches is None:
        return method(inside)
    bare, written = parse(inside)
    if "microbatches" in written:
        raise UsageError(f"{name}(microbatches={microbatches}, inside={inside}): give microbatches in one place")
    if "microbatches" not in inspect.signature(builder(bare)).parameters:
        raise UsageError(f"{name}(microbatches={microbatches}, inside={inside}): {bare} has no option microbatches")
    return method(inside, microbatches=microbatches)


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
