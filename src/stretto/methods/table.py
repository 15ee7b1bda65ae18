"""The table of names: from what a user writes to a method."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stretto.errors import UsageError, nearest
from stretto.methods.backprop import backprop, whole_network
from stretto.methods.definition import Method
from stretto.methods.listed import csv
from stretto.methods.local_updates import chunked, greedy, overlapping
from stretto.methods.nesterov import nesterov
from stretto.methods.phases import Phases
from stretto.methods.pipedream import pipedream, pipedream_2bw
from stretto.methods.pipelined_backprop import paci, pb, pb_lwp, pb_lwp_sc, pb_lwpw, pb_sc
from stretto.methods.pipelines import gpipe, interleaved, looped_bfs, one_f_one_b, zb_h1, zb_v
from stretto.methods.pipemare import pipemare
from stretto.methods.pipeoptim import pipeoptim
from stretto.methods.recompute import recomputing
from stretto.methods.spectrain import spectrain
from stretto.options.checks import shown
from stretto.options.parse import parse

METHODS: dict[str, Callable[..., Method]] = {
    "backprop": backprop,
    "greedy": greedy,
    "overlapping": overlapping,
    "chunked": chunked,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
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


FROM_FILES: dict[str, Callable[..., Method]] = {"csv": csv}  # they need a file: no part of `--methods all`
PHASES = ("warmup", "finish")  # options of every asynchronous pipeline


def method(name: str | Method, **options: Any) -> Method:
    """The method called `name`, with its options; also written as one string, `"chunked(chunks=4)"`.

    Every method takes `recompute` (`methods/recompute.py`). Every asynchronous pipeline also takes `warmup` and
    `finish`: the minibatches before the one and from the other on are trained synchronously.

    Raises UsageError for an unknown name or option (naming the nearest) and for a value out of range.
    """
    if isinstance(name, Method):
        if options:
            raise UsageError(f"{name} is a method already; its options {', '.join(options)} cannot be changed")
        return name
    if not isinstance(name, str):
        raise UsageError(f"method={shown(name)}: give a name, or what stretto.method(name, ...) returns")
    bare, written = parse(name)
    build = METHODS.get(bare) or FROM_FILES.get(bare)
    if build is None:
        raise UsageError(f"unknown method {bare!r}: {nearest(bare, [*METHODS, *FROM_FILES])}")
    chosen = {**written, **options}
    own = inspect.signature(build).parameters
    built = build(**{key: value for key, value in chosen.items() if key in own})
    delayed = not built.synchronous and built.reach is whole_network
    known = [*own, "recompute", *PHASES] if delayed else [*own, "recompute"]
    for key in chosen:
        if key in PHASES and not delayed:
            what = "is synchronous" if built.synchronous else "has losses of its own on its stages"
            raise UsageError(
                f"method {bare!r} {what}: {key} is for pipelines with old gradients, such as pb or pipemare"
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


def with_microbatches(chosen: Method, count: int) -> Method:
    """A synchronous method with its minibatch cut into `count` micro-batches, if it takes so many and none are given.

    Any other method as it is: a turn of it takes as many as it takes, and more micro-batches are more turns.
    """
    build = METHODS.get(chosen.name)
    free = build is not None and "microbatches" in inspect.signature(build).parameters
    if not chosen.synchronous or not free or chosen.options.get("microbatches") is not None:
        return chosen
    return method(chosen.name, **{**chosen.options, "microbatches": count})
