"""Clusters as TOML files, Stretto's own included. Every error names the file, the key, the value and a remedy."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from stretto.cost.attained import Attained
from stretto.cost.cluster import Cluster, Device, Group, Link, Rate
from stretto.cost.collective import Collective
from stretto.cost.rings import Steps
from stretto.errors import UsageError, nearest
from stretto.files.destinations import writing
from stretto.options.checks import of_kind
from stretto.options.checks import path as check_path
from stretto.options.kinds import parse_toml

T = TypeVar("T")
HOME = files("stretto.cost") / "clusters"
BY_NAME = ("products_in", "memory_of", "per_launch_of")  # of `Attained`
FORMER = ("indexed_numbers", "odd_products")  # keys of `Attained` that files of 0.2 may have: nothing asks for them now
TYPES = {"bool": "true or false", "str": "text", "int": "whole number"}  # what a file's values are called


def names() -> list[str]:
    """The names of the clusters that come with Stretto."""
    return sorted(file.name.removesuffix(".toml") for file in HOME.iterdir() if file.name.endswith(".toml"))


def find_cluster(name: str) -> Cluster:
    """A cluster by its name, or from a file. Raises UsageError if there is none, or its contents are wrong."""
    of_kind("cluster", name, str, f"a name or the path of a TOML file; names are {', '.join(names())}")
    if name in names():
        return parse(HOME.joinpath(f"{name}.toml").read_text(encoding="utf-8"), f"cluster {name}")
    if "\0" in name or (not name.endswith(".toml") and not Path(name).is_file()):
        raise UsageError(f"no cluster {name!r}: {nearest(name, names())}; or give a file, written by stretto calibrate")
    return read_cluster(Path(name))


def read_cluster(file: str | Path) -> Cluster:
    """A cluster from a TOML file. Raises UsageError if it cannot be read or its contents are wrong."""
    check_path("file", file)
    file = Path(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"no cluster in {file}: {error.strerror}; write one with stretto calibrate --out {file}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is no TOML file: {error}") from error
    return parse(text, str(file))


def write_cluster(cluster: Cluster, file: str | Path) -> None:
    """Write a cluster to a TOML file that `read_cluster` reads. The file is written whole or not at all."""
    of_kind("cluster", cluster, Cluster, "a stretto.cost.Cluster")
    check_path("file", file)
    if Path(file).is_dir():
        raise UsageError(f"{file} is a folder: name a file, such as cluster.toml")
    with writing(Path(file)) as path:
        path.write_text(to_toml(cluster), encoding="utf-8")


def to_toml(cluster: Cluster) -> str:
    """The cluster as TOML text."""
    import tomli_w

    return tomli_w.dumps(to_dict(cluster))


def to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster as nested dicts for TOML and JSON, without fields that are None, and empty collectives."""
    content: dict[str, Any] = without_none(asdict(cluster))
    for device in content["devices"].values():
        if device["speed"] == 1:
            del device["speed"]
        for key in BY_NAME:
            if not device.get("attained", {key: True})[key]:
                del device["attained"][key]
    for link in content["links"].values():
        for steps in (*link["rings"].values(), *([link["tree"]] if "tree" in link else [])):
            among = steps.pop("among")
            steps |= {"among": {str(processes): number for processes, number in among.items()}} if among else {}
        for key in ("collectives", "rings"):
            if not link[key]:
                del link[key]
    return content if content["doubts"] else {key: value for key, value in content.items() if key != "doubts"}


def without_none(value: Any) -> Any:
    """Nested dicts and lists without the entries that are None."""
    if isinstance(value, dict):
        return {key: without_none(member) for key, member in value.items() if member is not None}
    return [without_none(member) for member in value] if isinstance(value, list | tuple) else value


def parse(text: str, origin: str) -> Cluster:
    """A cluster from TOML text; `origin` names it in messages. Raises UsageError if the text is wrong."""
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{origin} is no TOML file: {error}") from error
    try:
        return cluster_of(content)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None


def cluster_of(content: Mapping[str, Any]) -> Cluster:
    """The cluster that `to_dict` turned into `content`."""
    return build(Cluster, "", content, {
        "groups": lambda place, value: tuple(
            build(Group, f"{place}[{i}]", group, {"speeds": numbers}) for i, group in enumerate(listed(place, value))
        ),
        "devices": lambda place, value: each_of(place, value, device_of),
        "links": lambda place, value: each_of(place, value, link_of),
        "sources": lambda place, value: table(place, value),
        "doubts": lambda place, value: texts(place, value),
    })  # fmt: skip


def link_of(place: str, content: Any) -> Link:
    """A link, with its collectives, from a table."""
    return build(Link, place, content, {
        "collectives": lambda at, value: each_of(at, value, lambda key, entry: build(Collective, key, entry)),
        "rings": lambda at, value: each_of(at, value, steps_of),
        "tree": steps_of,
    })  # fmt: skip


def steps_of(place: str, content: Any) -> Steps:
    """A protocol of a ring or tree, from a table."""
    return build(Steps, place, content, {"among": by_processes})


def by_processes(place: str, value: Any) -> dict[int, float]:
    """Numbers by a number of processes, from a table."""
    for key in table(place, value):
        if not key.isdecimal():
            raise UsageError(f"{place}.{key}: a number of processes belongs here, {place}.2 for two")
    return {int(key): checked(f"{place}.{key}", number, "float") for key, number in table(place, value).items()}


def device_of(place: str, content: Any) -> Device:
    """A device, with its rates, from a table."""

    def rate(at: str, value: Any) -> Rate:
        return build(Rate, at, value)

    return build(Device, place, content, {
        "peak": lambda at, value: each_of(at, value, lambda key, number: checked(key, number, "float")),
        "attained": attained_of,
        "rates": lambda at, value: each_of(at, value, lambda key, passes: each_of(key, passes, rate)),
    })  # fmt: skip


def attained_of(place: str, content: Any) -> Attained:
    """What a device attains, from a table."""

    def by_name(at: str, value: Any) -> dict[str, float]:
        return each_of(at, value, lambda key, number: checked(key, number, "float"))

    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in FORMER}
    return build(Attained, place, content, dict.fromkeys(BY_NAME, by_name))


def build(kind: type[T], place: str, content: Any, readers: Mapping[str, Callable[[str, Any], Any]] | None = None) -> T:
    """A dataclass of class `kind` from a table; `place` is the table's dotted key. Checks the types of its values."""
    declared: dict[str, Any] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    entries = table(place, content)
    for key in entries:
        if key not in declared:
            raise UsageError(f"{dotted(place, key)} is no key of a cluster: {nearest(key, declared)}")
    for key, field in declared.items():
        if key not in entries and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{dotted(place, key)} is missing: add it")
    read = {
        key: (readers or {}).get(key, lambda at, entry, key=key: checked(at, entry, str(declared[key].type)))(
            dotted(place, key), value
        )
        for key, value in entries.items()
    }
    try:
        return kind(**read)
    except UsageError as error:
        raise UsageError(dotted(place, f"{error}")) from None


def dotted(place: str, key: str) -> str:
    """The dotted name of a key in the table at `place`."""
    return f"{place}.{key}" if place else key


def table(place: str, value: Any) -> Mapping[str, Any]:
    """The value as a table; raises UsageError for anything else."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{place} = {value!r}: a table belongs here, [{place}] and its keys below")
    return value


def listed(place: str, value: Any) -> list[Any]:
    """The value as a list of tables; raises UsageError for anything else."""
    if not isinstance(value, list):
        raise UsageError(f"{place} = {value!r}: a list of tables belongs here, [[{place}]] and their keys below")
    return value


def texts(place: str, value: Any) -> tuple[str, ...]:
    """The value as texts; raises UsageError for anything else."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UsageError(f"{place} = {value!r}: a list of texts belongs here")
    return tuple(value)


def numbers(place: str, value: Any) -> tuple[float, ...]:
    """The value as numbers; raises UsageError for anything else."""
    if not isinstance(value, list):
        raise UsageError(f"{place} = {value!r}: a list of numbers belongs here")
    return tuple(checked(f"{place}[{i}]", number, "float") for i, number in enumerate(value))


def each_of(place: str, value: Any, read: Callable[[str, Any], T]) -> dict[str, T]:
    """The table's entries, each converted by `read(dotted key, value)`."""
    return {key: read(f"{place}.{key}", entry) for key, entry in table(place, value).items()}


def checked(place: str, value: Any, kind: str) -> Any:
    """The value, if it is a number, text, or true or false, as its field declares; else raises UsageError."""
    expected = next((name for part, name in TYPES.items() if part in kind), "number")
    fits = {
        "true or false": isinstance(value, bool),
        "text": isinstance(value, str),
        "whole number": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
    }[expected]
    if not fits:
        raise UsageError(f"{place} = {value!r}: {'' if 'bool' in kind else 'a '}{expected} belongs here")
    return float(value) if expected == "number" else value
