"""Frozen dataclasses from nested tables, as TOML and JSON have them, by the type hints of their fields. No torch here.

Every error names the dotted key, the value and a remedy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from stretto.errors import UsageError, nearest
from stretto.options.checks import hints_of

T = TypeVar("T")
PLAIN = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}
LISTED = {str: "a list of texts", float: "a list of numbers", int: "a list of numbers"}


@dataclass(frozen=True)
class TableReader:
    """Reads tables of `what`. The keys `former` stand in older files, and mean nothing now."""

    what: str
    former: tuple[str, ...] = ()

    def record(self, kind: type[T], place: str, content: Any) -> T:
        """A dataclass from a table; `place` is the table's dotted key. Raises UsageError for another table."""
        hints, declared = hints_of(kind), {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
        entries = {key: value for key, value in table(place, content).items() if key not in self.former}
        for key in entries:
            if key not in declared:
                raise UsageError(f"{dotted(place, key)} is no key of a {self.what}: {nearest(key, declared)}")
        for key, field in declared.items():
            if key not in entries and field.default is MISSING and field.default_factory is MISSING:
                raise UsageError(f"{dotted(place, key)} is missing: add it")
        read = {key: self.value(hints[key], dotted(place, key), value) for key, value in entries.items()}
        try:
            return kind(**read)
        except UsageError as error:
            raise UsageError(dotted(place, f"{error}")) from None

    def value(self, hint: Any, place: str, value: Any) -> Any:
        """A value of the kind that a type hint names. Raises UsageError for another."""
        origin, members = get_origin(hint) or hint, get_args(hint)
        if origin in (Union, UnionType):
            if value is None and NoneType in members:
                return None
            several = [member for member in members if member is not NoneType]
            alike = [
                kind for kind in several if is_dataclass(kind) and {*value} == {field.name for field in fields(kind)}
            ]
            return self.value((alike or several)[0], place, value)
        if is_dataclass(origin):
            return self.record(origin, place, value)  # type: ignore[arg-type]
        if origin is Mapping:
            return self.entries(members[0], members[1], place, value)
        if isinstance(origin, type) and issubclass(origin, tuple):
            return self.listed(origin, members, place, value)
        if origin not in PLAIN:
            return value
        if not isinstance(value, int | float if origin is float else origin) or (type(value) is bool) != (
            origin is bool
        ):
            raise UsageError(f"{place} = {value!r}: {PLAIN[origin]} belongs here")
        return float(value) if origin is float else value

    def entries(self, key_kind: Any, hint: Any, place: str, value: Any) -> dict[Any, Any]:
        """A table whose keys are names, or numbers of processes."""
        for key in table(place, value) if key_kind is int else ():
            if not key.isdecimal():
                raise UsageError(f"{place}.{key}: a number of processes belongs here, {place}.2 for two")
        return {key_kind(key): self.value(hint, f"{place}.{key}", each) for key, each in table(place, value).items()}

    def listed(self, kind: type, members: Sequence[Any], place: str, value: Any) -> Any:
        """A tuple, or a named one, from a list."""
        if kind is not tuple:
            pairs = zip(get_type_hints(kind).values(), value, strict=True)
            return kind(*(self.value(hint, place, each) for hint, each in pairs))
        texts = members[0] is str and isinstance(value, list | tuple) and not all(isinstance(x, str) for x in value)
        if texts or not isinstance(value, list | tuple):
            tables = f"a list of tables belongs here, [[{place}]] and their keys below"
            said = LISTED.get(members[0])
            raise UsageError(f"{place} = {value!r}: {f'{said} belongs here' if said else tables}")
        hints = [members[0]] * len(value) if members[-1] is ... else members
        found = enumerate(zip(hints, value, strict=True))
        return tuple(self.value(hint, f"{place}[{index}]", each) for index, (hint, each) in found)


def dotted(place: str, key: str) -> str:
    """The dotted name of a key in the table at `place`."""
    return f"{place}.{key}" if place else key


def table(place: str, value: Any) -> Mapping[str, Any]:
    """The value as a table; raises UsageError for anything else."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{place} = {value!r}: a table belongs here, [{place}] and its keys below")
    return value
