"""Clusters as TOML: files, and those that come with Stretto. Every mistake names file, key, value and remedy."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from stretto.cost.cluster import Cluster, Device, Group, Link, Rate
from stretto.errors import UsageError, nearest
from stretto.files.whole_files import write_whole
from stretto.options.checks import of_kind
from stretto.options.checks import path as check_path

T = TypeVar("T")
HOME = files("stretto.cost") / "clusters"


def names() -> list[str]:
    """The clusters that come with Stretto."""
    return sorted(file.name.removesuffix(".toml") for file in HOME.iterdir() if file.name.endswith(".toml"))


def find_cluster(name: str) -> Cluster:
    """A cluster by its name, or from a file. Raises UsageError where there is none, or one that cannot be."""
    of_kind("cluster", name, str, f"a name or the path of a TOML file; names are {', '.join(names())}")
    if name in names():
        return parse(HOME.joinpath(f"{name}.toml").read_text(encoding="utf-8"), f"cluster {name}")
    if "\0" in name or (not name.endswith(".toml") and not Path(name).is_file()):
        raise UsageError(f"no cluster {name!r}: {nearest(name, names())}; or give a file, written by stretto calibrate")
    return read_cluster(Path(name))


def read_cluster(file: str | Path) -> Cluster:
    """A cluster from a file. Raises UsageError with what is wrong in it."""
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
    """Write what `read_cluster` reads; the file is there whole or not at all."""
    of_kind("cluster", cluster, Cluster, "a stretto.cost.Cluster")
    check_path("file", file)
    if Path(file).is_dir():
        raise UsageError(f"{file} is a folder: name a file, such as cluster.toml")
    write_whole(Path(file), to_toml(cluster))


def to_toml(cluster: Cluster) -> str:
    """The cluster as text."""
    import tomli_w

    return tomli_w.dumps(to_dict(cluster))


def to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster as TOML and JSON take it: without what is not known."""
    content: dict[str, Any] = known(asdict(cluster))
    return content


def known(value: Any) -> Any:
    """A nest of values without those that are None."""
    if isinstance(value, dict):
        return {key: known(member) for key, member in value.items() if member is not None}
    return [known(member) for member in value] if isinstance(value, list | tuple) else value


def parse(text: str, origin: str) -> Cluster:
    """A cluster from text; `origin` is what messages call it."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{origin} is no TOML file: {error}") from error
    try:
        return cluster_of(content)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None


def cluster_of(content: Mapping[str, Any]) -> Cluster:
    """From what `to_dict` gave."""
    return build(Cluster, "", content, {
        "groups": lambda place, value: tuple(
            build(Group, f"{place}[{i}]", group) for i, group in enumerate(listed(place, value))
        ),
        "devices": lambda place, value: each_of(place, value, device_of),
        "links": lambda place, value: each_of(place, value, lambda at, link: build(Link, at, link)),
        "sources": lambda place, value: table(place, value),
    })  # fmt: skip


def device_of(place: str, content: Any) -> Device:
    """A device and its rates."""

    def rate(at: str, value: Any) -> Rate:
        return build(Rate, at, value)

    return build(Device, place, content, {
        "peak": lambda at, value: each_of(at, value, lambda key, each: checked(key, each, "float")),
        "rates": lambda at, value: each_of(at, value, lambda key, each: each_of(key, each, rate)),
    })  # fmt: skip


def build(kind: type[T], place: str, content: Any, readers: Mapping[str, Callable[[str, Any], Any]] | None = None) -> T:
    """A dataclass from a table, its values checked against the types of its fields."""
    declared: dict[str, Any] = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    given = table(place, content)
    for key in given:
        if key not in declared:
            raise UsageError(f"{inside(place, key)} is no key of a cluster: {nearest(key, declared)}")
    for key, each in declared.items():
        if key not in given and each.default is MISSING and each.default_factory is MISSING:
            raise UsageError(f"{inside(place, key)} is missing: add it")
    read = {
        key: (readers or {}).get(key, lambda at, x, key=key: checked(at, x, str(declared[key].type)))(
            inside(place, key), value
        )
        for key, value in given.items()
    }
    try:
        return kind(**read)
    except UsageError as error:
        raise UsageError(inside(place, f"{error}")) from None


def inside(place: str, key: str) -> str:
    """A key's whole name."""
    return f"{place}.{key}" if place else key


def table(place: str, value: Any) -> Mapping[str, Any]:
    """Refuse what is no table."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{place} = {value!r}: a table belongs here, [{place}] and its keys below")
    return value


def listed(place: str, value: Any) -> list[Any]:
    """Refuse what is no list of tables."""
    if not isinstance(value, list):
        raise UsageError(f"{place} = {value!r}: a list of tables belongs here, [[{place}]] and their keys below")
    return value


def each_of(place: str, value: Any, read: Callable[[str, Any], T]) -> dict[str, T]:
    """Read every entry of a table."""
    return {key: read(f"{place}.{key}", each) for key, each in table(place, value).items()}


def checked(place: str, value: Any, kind: str) -> Any:
    """A number or a text, as its field is declared."""
    wanted = "text" if "str" in kind else "whole number" if "int" in kind else "number"
    fits = {
        "text": isinstance(value, str),
        "whole number": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
    }[wanted]
    if not fits:
        raise UsageError(f"{place} = {value!r}: a {wanted} belongs here")
    return float(value) if wanted == "number" else value
