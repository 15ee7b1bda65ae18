"""Checks of single arguments. No torch.

Each raises UsageError with the argument's name, its value and what to give instead.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeGuard, Union, get_args, get_origin, get_type_hints

from stretto.errors import UsageError, nearest

LONGEST = 80  # characters of a value in a message
MOST = 2**63  # a number of a file is below
MOST_STAGES = 10_000
"""More stages are taken for a mistyped number: a schedule of so many would take too long to list."""
MOST_DELAY = 2 * MOST_STAGES  # updates; a sum over those that a gradient missed would not end


def shown(value: Any) -> str:
    """A value as a message shows it, on one line; a tensor or an array by its shape, type and device."""
    if isinstance(value, tuple | list | dict) and holds_tensors(value):
        if isinstance(value, dict):
            return shortened("{" + ", ".join(f"{key!r}: {shown(each)}" for key, each in value.items()) + "}")
        inner = ", ".join(map(shown, value))
        return shortened(f"[{inner}]" if isinstance(value, list) else f"({inner})")
    kind, shape, dtype = type(value), getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and not isinstance(value, type):
        device = getattr(value, "device", None)
        where = "" if device is None or str(device) == "cpu" else f" on {device}"
        return f"{kind.__name__} {list(shape)} of {dtype}{where}"
    return shortened(repr(value))


def shortened(text: str) -> str:
    """A text on one line, and no longer than a message shows it."""
    if "\n" in text or len(text) > LONGEST:
        text = text.partition("\n")[0]
        return f"{text[: LONGEST - 4]} ..."
    return text


def holds_tensors(value: Any) -> bool:
    """Whether a tuple, list or dict has a tensor or an array in it, at any depth."""
    inner = value.values() if isinstance(value, dict) else value
    return any(
        holds_tensors(each)
        if isinstance(each, tuple | list | dict)
        else hasattr(each, "shape") and hasattr(each, "dtype")
        for each in inner
    )


def refuse(name: str, value: Any, wanted: str) -> NoReturn:
    """Raise UsageError with an argument's name and value; `wanted` is what to give instead."""
    raise UsageError(f"{name}={shown(value)}: give {wanted}")


def of_kind(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Refuse what is no instance of `kind`."""
    if not isinstance(value, kind):
        refuse(name, value, wanted)


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse an unknown word, and name the nearest known one."""
    words = list(known)
    if not isinstance(value, str):
        refuse(name, value, f"one of {', '.join(words)}")
    if value not in words:
        raise UsageError(f"{name}={value!r}: {nearest(value, words)}")


def is_among(value: object, known: Iterable[Any]) -> bool:
    """Whether `value` equals one of `known` and is an instance of its type. True is not 1, and an array never fits."""
    return any(
        isinstance(value, type(choice)) and isinstance(value, bool) is isinstance(choice, bool) and value == choice
        for choice in known
    )


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int; True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, and not nan; True is none."""
    return not isinstance(value, bool) and isinstance(value, Real) and not math.isnan(value)


def whole(name: str, value: Any, least: int = 0, most: int | None = None) -> None:
    """Refuse what is no whole number from `least` to `most`."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        upper = f"at least {least}" if most is None else f"{least} to {most}"
        refuse(name, value, f"a whole number, {upper}")


def number(name: str, value: Any, low: float = -math.inf, below: float = math.inf) -> None:
    """Refuse what is no finite number from `low` up to, but not including, `below`."""
    if is_number(value) and low <= value < below and abs(value) < math.inf:
        return
    if below < math.inf:
        refuse(name, value, f"a number from {low:g} up to, but not including, {below:g}")
    refuse(name, value, "a number" if low == -math.inf else f"a number of {low:g} or more")


def positive(name: str, value: Any) -> None:
    """Refuse what is no finite number above 0."""
    if not (is_number(value) and 0 < value < math.inf):
        refuse(name, value, "a positive number")


def flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    of_kind(name, value, bool, "True or False")


def function(name: str, value: Any, wanted: str, arguments: int | None = None, options: bool = False) -> None:
    """Refuse what cannot be called, with so many `arguments` if that is given; `wanted` says what function is meant.

    options: refuse a function written in C without a signature, too, as the names of its options are unknown.
    """
    if not callable(value):
        refuse(name, value, wanted)
    if arguments is not None:
        try:  # an nn.Module is called with anything, and passes it to its `forward`
            parameters = inspect.signature(value if isinstance(value, type) else getattr(value, "forward", value))
        except (ValueError, TypeError):  # written in C, without a signature: its own error is told
            if options:
                refuse(name, value, wanted)
            return
        try:
            parameters.bind(*range(arguments))
        except TypeError:
            refuse(name, value, wanted)


def path(name: str, value: Any, wanted: str = "a path, such as 'runs/one'") -> None:
    """Refuse what is no path: neither text nor a Path, empty, or with a character that no file system takes."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        refuse(name, value, wanted)


def sequence(name: str, value: Any, wanted: str) -> None:
    """Refuse what is no sequence of objects, such as a list of modules; text, dicts and tensors are none."""
    ordered = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, type)
    if not ordered or isinstance(value, str | bytes) or hasattr(value, "keys") or hasattr(value, "dtype"):
        refuse(name, value, wanted)


def mapping(name: str, value: Any, wanted: str) -> None:
    """Refuse what is no dict with names for keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, wanted)


def of_fields(owner: str, given: Any, *names: str) -> None:
    """Refuse values of a dataclass that its annotations exclude, of all fields or of those named.

    `owner` begins the message: "EarlyStop: ", or "" for a setting.
    """
    kind: Any = type(given)
    hints = hints_of(kind)
    for name in names or hints:
        value = getattr(given, name)
        if misfit(value, hints[name]) is not None:
            refuse(owner + name, value, in_words(hints[name]))


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


Misfit = tuple[str, Any, Sequence[Any]]
"""The place of a value, the value, and the type hints of which none fits it."""


def misfit(value: Any, hint: Any, place: str = "", *, read: bool = False) -> Misfit | None:
    """The innermost part of a value at a place that is of no kind which a type hint names; None where all fits.

    A whole number is a number, too, and True is neither. With `read` the value is from a file: a table stands for a
    dataclass and a list for a tuple, and a number is finite and fits into 64 bits.
    """
    container: Any = get_origin(hint) or hint
    inner = get_args(hint)
    if container in (Union, UnionType):
        alike = [each for each in inner if is_alike(value, get_origin(each) or each)]
        if len(alike) == 1:
            return misfit(value, alike[0], place, read=read)
        return None if any(misfit(value, each, read=read) is None for each in inner) else (place, value, inner)
    if container is Literal:
        return None if is_among(value, inner) else (place, value, [hint])
    kind: Any = container
    parts: list[tuple[str, Any, Any]] = []  # place, value and hint of each
    if container is tuple or (read and container in (list, Sequence)):
        fixed = container is tuple and bool(inner) and inner[-1] is not ...
        fits = isinstance(value, list | tuple) and not (fixed and len(value) != len(inner))
        if fits and inner:
            parts = [(f"{place}[{at}]", each, inner[at if fixed else 0]) for at, each in enumerate(value)]
    elif isinstance(container, type) and issubclass(container, Mapping):
        fits = isinstance(value, Mapping if read else container)
        for key, each in value.items() if fits and inner else ():
            parts += [(f"{place}: a key", key, inner[0]), (f"{place}.{key}", each, inner[1])]
    elif read and is_dataclass(container):
        fits = isinstance(value, Mapping)
        if fits:
            parts = [(f"{place}: {key}", value[key], each) for key, each in hints_of(kind).items() if key in value]
    else:
        fits = container is Any or is_plain(value, container, read=read)
    if not fits:
        return place, value, [hint]
    found = (misfit(each, of, where, read=read) for where, each, of in parts)
    return next((each for each in found if each is not None), None)


def is_alike(value: Any, container: Any) -> bool:
    """Whether a value is a list and a hint's class that of lists; or both are of tables."""
    if isinstance(value, Mapping):
        return container in (dict, Mapping) or is_dataclass(container)
    return isinstance(value, list | tuple) and container in (tuple, list, Sequence)


def is_plain(value: Any, kind: Any, *, read: bool) -> bool:
    """Whether a value is an instance of a class that is no container; see `misfit`."""
    if isinstance(value, bool):
        return kind in (bool, object)
    if kind not in (int, float):
        return isinstance(kind, type) and isinstance(value, kind)
    if not read:  # NumPy's, too
        return isinstance(value, Integral if kind is int else Real)
    if isinstance(value, int):
        return abs(value) < MOST
    return kind is float and isinstance(value, float) and math.isfinite(value)


WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    NoneType: "None",
    Callable: "a function",
    os.PathLike: "a path",
}


def in_words(hint: Any) -> str:
    """What an annotation asks for, as a message says it."""
    container, inner = get_origin(hint), get_args(hint)
    if container in (Union, UnionType):
        return " or ".join(in_words(member) for member in inner)
    if container is Literal:
        return " or ".join(map(repr, inner))
    if container is tuple:
        return f"a tuple, each member {in_words(inner[0])}"
    if isinstance(container, type) and issubclass(container, Mapping):
        return f"a dict from {in_words(inner[0])} to {in_words(inner[1])}"
    kind = container or hint
    return WORDS.get(kind) or f"a {kind.__module__.partition('.')[0]}.{kind.__qualname__}"


FLOAT16 = {"fp16", "float16", "f16", "half", "16"}


def refuse_float16(precision: object) -> None:
    """Raise UsageError for a precision that asks for float16, by any of the names that it has elsewhere."""
    words = str(precision).lower().removeprefix("torch.").replace("_", "-").split("-")
    if FLOAT16 & {*words}:
        raise UsageError(
            f"precision={str(precision)!r}: there is no float16. It needs a loss scale that all stages change, and "
            "updates that all of them skip, together; stages that update at different times cannot "
            "(docs/guide/python.md says more). Take bf16, whose range is that of float32, or bf16-autocast"
        )
