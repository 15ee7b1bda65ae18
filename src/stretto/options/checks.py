"""Checks of single arguments. No torch.

Each raises UsageError with the argument's name, its value and what to give instead.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeGuard, Union, get_args, get_origin, get_type_hints

from stretto.errors import UsageError, nearest

LONGEST = 80  # characters of a value in a message
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
    """Refuse a word that is not among those that are known, and name the nearest."""
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
        try:
            parameters = inspect.signature(value)
        except ValueError:  # written in C, without a signature: its own error is told
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
        if not fits(value, hints[name]):
            refuse(owner + name, value, in_words(hints[name]))


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a kind that an annotation names. A whole number is a number, too, and True is neither."""
    container, inner = get_origin(hint), get_args(hint)
    if container in (Union, UnionType):
        return any(fits(value, member) for member in inner)
    if container is Literal:
        return is_among(value, inner)
    if hint is Any:
        return True
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's, too
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if container is tuple and inner[1:] == (...,):
        return isinstance(value, tuple | list) and all(fits(member, inner[0]) for member in value)
    if isinstance(container, type) and issubclass(container, Mapping):
        return isinstance(value, container) and all(
            fits(key, inner[0]) and fits(member, inner[1]) for key, member in value.items()
        )
    return isinstance(value, container or hint)


WORDS: Mapping[Any, str] = {
    int: "a whole number", float: "a number", str: "text", bool: "True or False", NoneType: "None",
    Callable: "a function", os.PathLike: "a path",
}  # fmt: skip


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
