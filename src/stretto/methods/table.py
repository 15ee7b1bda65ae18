"""The table of names: from what a user writes to a method."""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stretto.arguments import shown
from stretto.errors import UsageError, nearest
from stretto.methods.backprop import backprop, whole_network
from stretto.methods.listed import csv
from stretto.methods.local_updates import chunked, greedy, overlapping
from stretto.methods.method import Method
from stretto.methods.nesterov import nesterov
from stretto.methods.phases import Phases
from stretto.methods.pipedream import pipedream, pipedream_2bw
from stretto.methods.pipelined_backprop import paci, pb, pb_lwp, pb_lwp_sc, pb_lwpw, pb_sc
from stretto.methods.pipelines import gpipe, interleaved, looped_bfs, one_f_one_b, zb_h1, zb_v
from stretto.methods.pipemare import pipemare
from stretto.methods.pipeoptim import pipeoptim
from stretto.methods.recompute import recomputing
from stretto.methods.spectrain import spectrain

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


def parse(text: str, what: str = "method") -> tuple[str, dict[str, Any]]:
    """Split "chunked(chunks=4)" in its name and its options; a value is a Python literal, or a bare word.

    A word may be hyphenated, and have options of its own: `head=two-layer(width=64)`.
    """
    bare, parenthesis, rest = text.strip().partition("(")
    if not parenthesis:
        return bare, {}
    try:
        call = ast.parse(f"f({PATH.sub(quoted, rest)}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("options are written name=value")
        names = [keyword.arg or "**" for keyword in call.keywords]
        if len(names) > len(set(names)):
            raise ValueError("an option stands twice")
        return bare.strip(), {keyword.arg or "**": literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"cannot read the {what} {text!r} ({error}): write it as NAME or NAME(option=value, ...)"
        ) from error


PATH = re.compile(r"(\bpath\s*=\s*)([^\s'\",()]+)")


def quoted(found: re.Match[str]) -> str:
    """A file's name that stands without quotation marks, with them."""
    return f"{found[1]}{found[2]!r}"


def literal(node: ast.expr) -> Any:
    """The value of a literal; a bare word stands for itself (`combine=mean`), but for true, false and none."""
    if isinstance(node, ast.Name):
        return WORDS.get(node.id.lower(), node.id)
    if isinstance(node, ast.Call | ast.BinOp) and isinstance(leftmost(node), ast.Name) and not positional(node):
        return ast.unparse(node).replace(" - ", "-")
    return ast.literal_eval(node)


def positional(node: ast.expr) -> bool:
    """Whether an option has no name."""
    return isinstance(node, ast.Call) and bool(node.args)


def leftmost(node: ast.expr) -> ast.expr:
    """Where an expression begins."""
    while isinstance(node, ast.Call | ast.BinOp):
        node = node.func if isinstance(node, ast.Call) else node.left
    return node


WORDS = {"true": True, "false": False, "none": None}


def split_list(text: str) -> list[str]:
    """Split "greedy,chunked(chunks=4, head=linear)" at the commas that stand outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
