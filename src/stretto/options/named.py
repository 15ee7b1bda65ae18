"""Checks of options given by name, of networks, heads and data sets; `owner` is whose they are, in messages."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.errors import UsageError, nearest
from stretto.options.checks import is_whole, shown

MOST = 10**12  # larger whole numbers are mistyped


def option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's keyword-only options."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def resolve(owner: str, function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, object]:
    """All keyword-only options of `function`, in its order: those given, and its defaults for the rest.

    Raises UsageError for a name that the function does not know, with the nearest one that it does. `owner` is the
    message's subject, "model 'mlp'".
    """
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in options:
        if name not in defaults:
            raise UsageError(f"{owner} has no option {name!r}; {nearest(name, defaults)}")
    return defaults | dict(options)


def whole(owner: str, option: str, value: object, *, least: int = 1) -> None:
    """Refuse a `value` that is no whole number from `least` to 10**12; True is none."""
    if not is_whole(value) or value < least:
        raise UsageError(f"{owner}: {option}={shown(value)} must be a whole number of at least {least}")
    if value > MOST:
        raise UsageError(f"{owner}: {option}={value} must be at most {MOST:,}")


def choose(owner: str, option: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a `value` that is none of the `choices`, or equal to one but of another type, as True and 1 are."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        among = (
            nearest(value, map(str, choices)) if isinstance(value, str) else f"choose {', '.join(map(str, choices))}"
        )
        raise UsageError(f"{owner}: {option}={shown(value)}; {among}")
