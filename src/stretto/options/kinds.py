"""Values from files, checked by the type hints of what they become. No torch.

Lists stand for tuples, and whole numbers for numbers. A number is finite, and fits into 64 bits.
"""

import json
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from stretto.errors import UsageError
from stretto.options.checks import MOST, hints_of, is_alike, misfit, shown

WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
    tuple: "a list",
    list: "a list",
    Sequence: "a list",
    dict: "a table",
    Mapping: "a table",
}
R = TypeVar("R")


def read_text(file: Path) -> str:
    """The content of a file in UTF-8. Raises UsageError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is no text in UTF-8: {error}") from error


def read_json(file: Path, text: str | None = None, line: int | None = None) -> Any:
    """The content of a JSON file, or of a `text` that is a line of it. Raises UsageError where it cannot be read."""
    try:
        return json.loads(read_text(file) if text is None else text)
    except (ValueError, RecursionError) as error:
        place = f"{file}" if line is None else f"{file}, line {line}"
        raise UsageError(f"{place} is no JSON: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """The content of TOML. Raises ValueError for anything else, also for what is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Say where it stands in UsageError of a value, and for one that is missing."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error
    except KeyError as error:
        raise UsageError(f"{place} lacks {error.args[0]}") from error


def read_record(kind: type[R], values: Any, place: str) -> R:
    """Make a dataclass of a table at a `place` of a file. Other keys are ignored: newer files stay readable.

    Raises UsageError, naming the place, for values of other kinds and for what is missing.
    """
    record: Any = kind
    check_values(place, values, record)
    required = [each for each in fields(record) if each.default is MISSING and each.default_factory is MISSING]
    if missing := [each.name for each in required if each.name not in values]:
        raise UsageError(f"{place} lacks {', '.join(missing)}; it has {', '.join(values) or 'nothing'}")
    return kind(
        **{
            name: converted(values[name], hint, f"{place}: {name}")
            for name, hint in hints_of(record).items()
            if name in values
        }
    )


def converted(value: Any, hint: Any, place: str) -> Any:
    """A checked value as its type hint has it: lists as tuples, tables as dataclasses."""
    hints = [each for each in get_args(hint) if is_alike(value, get_origin(each) or each)]
    kind = hints[0] if len(hints) == 1 and get_origin(hint) in (Union, types.UnionType) else hint
    container, inner = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(container) and isinstance(container, type):
        return read_record(container, value, place)
    if container is tuple and inner:  # of one kind
        return tuple(converted(each, inner[0], f"{place}[{at}]") for at, each in enumerate(value))
    return value


def check_values(place: str, values: Any, kind: Any) -> None:
    """Raise UsageError, naming the key and its value, unless a table's values are of the kinds that a class declares.

    `kind` is a dataclass, or a dict of type hints. Other keys are not looked at. `place` names the table.
    """
    check_kind(place, values, dict)
    hints = kind if isinstance(kind, Mapping) else hints_of(kind)
    for key, hint in hints.items():
        if key in values:
            check_kind(f"{place}: {key}", values[key], hint)


def check_kind(place: str, value: Any, hint: Any) -> None:
    """Raise UsageError for a value of another kind than a type hint names; `place` is where it stands."""
    found = misfit(value, hint, place, read=True)
    if found is None:
        return
    where, part, hints = found
    wanted = ", or ".join(dict.fromkeys(map(in_words, hints)))
    large = type(part) in (int, float) and not abs(part) < MOST and bool({int, float} & {*hints})
    raise UsageError(f"{where} = {shown(part)}: {wanted} belongs here{', finite and of at most 64 bits' * large}")


def in_words(hint: Any) -> str:
    """What a type hint asks for in a file."""
    container, inner = get_origin(hint) or hint, get_args(hint)
    of_so_many = f" of {len(inner)} values" if container is tuple and inner and inner[-1] is not ... else ""
    return WORDS.get(container, "something else") + of_so_many
