"""How the words of a command line, or the values of a TOML file, become values of settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from cyclopts import Parameter, Token

from stretto.methods.table import split_list

Option = str | int | float | bool


def word(kind: type, text: str) -> Any:
    """Read one word; 3.5 is no whole number, though it could be rounded to one."""
    try:
        return kind(text)
    except ValueError as error:
        name = {int: "whole number", float: "number"}[kind]
        raise ValueError(f"{text!r} is no {name}") from error


def whole_number(_: Any, tokens: Sequence[Token]) -> Any:
    """Read `--steps 9`."""
    return word(int, tokens[0].value)


def list_of(kind: type) -> Parameter:
    """Let `--lr 0.1,0.3` and `--lr 0.1 0.3` mean the same; commas inside parentheses belong to a method's options."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        return tuple(word(kind, part) for token in tokens for part in split_list(str(token.value)))

    return Parameter(consume_multiple=True, converter=convert, negative="")


def options(_: Any, tokens: Any) -> dict[str, Option]:
    """Read `--model-options.width 256`: a number where it looks like one, true and false, else text."""
    if not isinstance(tokens, Mapping):
        raise ValueError(f"{tokens[0].value!r} has no name: write NAME.OPTION VALUE, as in --model-options.width 256")
    return {name.replace("-", "_"): option(values[-1].value) for name, values in tokens.items()}


def option(text: str) -> Option:
    """Read the value of an option of a network or a data set."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


WHOLE = Parameter(converter=whole_number)
OPTIONS = Parameter(converter=options)
TEXTS, NUMBERS, WHOLES = list_of(str), list_of(float), list_of(int)
