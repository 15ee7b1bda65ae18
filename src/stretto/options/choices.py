"""Values chosen by name with options, "local-sgd(every=8)": frozen dataclasses, each under its name. No torch."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from stretto.errors import UsageError, nearest
from stretto.options.parse import WORDS, parse

C = TypeVar("C")


def find_choice(text: str, what: str, choices: Mapping[str, type[C]]) -> C:
    """The dataclass that a text names, made with its options.

    Raises UsageError, which calls it a `what`, for a name or an option that there is not.
    """
    bare, options = parse(text, what)
    if bare not in choices:
        raise UsageError(f"unknown {what} {bare!r}: {nearest(bare, choices)}")
    option_names = [field.name for field in fields(choices[bare])]  # type: ignore[arg-type]
    for key in options:
        if key not in option_names:
            raise UsageError(f"{what} {bare!r} has no option {key!r}: {nearest(key, option_names)}")
    return choices[bare](**options)


def choice_text(name: str, choice: Any) -> str:
    """The text from which `find_choice` makes this dataclass again; options that are None are left out."""
    values = [(field.name, getattr(choice, field.name)) for field in fields(choice)]
    options = ", ".join(f"{key}={option_text(value)}" for key, value in values if value is not None)
    return f"{name}({options})" if options else name


def option_text(value: Any) -> str:
    """An option's value as text: quoted if it is a string that would not be read as one."""
    is_word = isinstance(value, str) and value.replace("-", "_").isidentifier() and value.lower() not in WORDS
    return repr(value) if isinstance(value, str) and not is_word else str(value)
