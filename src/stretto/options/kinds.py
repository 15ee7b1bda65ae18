"""Values from files, checked by the type hints of what they become. No torch.

Lists stand for tuples, and whole numbers for numbers. A number is finite, and fits into 64 bits.
"""

import json
import math
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from stretto.errors import UsageError
from stretto.options.checks import shown

MOST = 2**63
WORDS: Mapping[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null",
    tuple: "a list", list: "a list", Sequence: "a list", dict: "a table", Mapping: "a table",
}  # fmt: skip
LISTS, TABLES = (tuple, list, Sequence), (dict, Mapping)


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


def check_values(place: str, values: Any, kind: Any) -> None:
    """Raise UsageError, naming the key and its value, unless a table's values are of the kinds that a class declares.

    `kind` is a dataclass, or a dict of type hints. Other keys are not looked at. `place` names the table.
    """
    check_kind(place, values, dict)
    hints = kind if isinstance(kind, Mapping) else hints_of(kind)
    for key, hint in hints.items():
        if key in values:
            check_kind(f"{place}: {key}", values[key], hint)


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """The type hints of a class, evaluated once."""
    return get_type_hints(kind)


def check_kind(place: str, value: Any, hint: Any) -> None:
    """Raise UsageError for a value of another kind than a type hint names; `place` is where it stands."""
    origin, members = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        check_kind(place, value, members[0])
    elif origin in (Union, types.UnionType):
        check_union(place, value, members)
    elif origin in LISTS:
        if not isinstance(value, list | tuple):
            refuse(place, value, [hint])
        fixed = origin is tuple and members and members[-1] is not ...
        if fixed and len(value) != len(members):
            raise UsageError(f"{place} = {shown(value)}: {len(members)} values belong here")
        for index, member in enumerate(value if members else ()):
            check_kind(f"{place}[{index}]", member, members[index] if fixed else members[0])
    elif origin in TABLES:
        if not isinstance(value, Mapping):
            refuse(place, value, [hint])
        for key, member in value.items() if members else ():
            if not isinstance(key, str):  # as a checkpoint's may be
                refuse(f"{place}: a key", key, [str])
            check_kind(f"{place}.{key}", member, members[1])
    elif is_dataclass(origin):
        check_values(place, value, origin)
    elif origin is not Any and not is_plain(value, origin):
        refuse(place, value, [hint])


def check_union(place: str, value: Any, members: Sequence[Any]) -> None:
    """Raise UsageError for a value that is of none of several kinds."""
    alike = [hint for hint in members if is_alike(value, get_origin(hint) or hint)]
    if len(alike) == 1:
        check_kind(place, value, alike[0])
    elif not any(is_plain(value, hint) for hint in members):
        refuse(place, value, members)


def is_alike(value: Any, origin: Any) -> bool:
    """Whether a value is a list, and a hint's class that of lists; or both are of tables."""
    if isinstance(value, Mapping):
        return origin in TABLES or is_dataclass(origin)
    return isinstance(value, list | tuple) and origin in LISTS


def is_plain(value: Any, kind: Any) -> bool:
    """Whether a value is one of a plain kind: a text, a number, true or false, null."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind in (int, float):
        whole = isinstance(value, int) and abs(value) < MOST
        return whole or (kind is float and isinstance(value, float) and math.isfinite(value))
    return isinstance(kind, type) and isinstance(value, kind)


def refuse(place: str, value: Any, hints: Sequence[Any]) -> None:
    """Raise UsageError with the kinds that a value could be of."""
    wanted = dict.fromkeys(WORDS.get(get_origin(hint) or hint, "something else") for hint in hints)
    large = type(value) in (int, float) and not abs(value) < MOST and bool({int, float} & {*hints})
    raise UsageError(
        f"{place} = {shown(value)}: {', or '.join(wanted)} belongs here{', finite and of at most 64 bits' * large}"
    )
