"""Checks of options given by name, before they reach the function that takes them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.errors import UsageError, nearest
from stretto.options.checks import shown

MOST = 10**12


def resolve(owner: str, function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, object]:
    """All keyword-only options of `function`, in its order: those given, and its defaults for the rest.

    A name that the function does not know is refused here, with the nearest one that it does; `owner` ("model 'mlp'")
    says in the message whose option it was taken for.
    """
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in options:
        if name not in defaults:
            raise UsageError(f"{owner} has no option {name!r}; {nearest(name, defaults)}")
    return defaults | dict(options)


def whole(owner: str, option: str, value: object, *, least: int = 1) -> None:
    """Refuse a `value` that is not a whole number of at least `least`; True is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{owner}: {option}={shown(value)} must be a whole number of at least {least}")
    if value > MOST:
        raise UsageError(f"{owner}: {option}={value} must be at most {MOST:,}")


def choose(owner: str, option: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a `value` that is none of the choices."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        among = (
            nearest(value, map(str, choices)) if isinstance(value, str) else f"choose {', '.join(map(str, choices))}"
        )
        raise UsageError(f"{owner}: {option}={shown(value)}; {among}")
