"""Clusters as TOML files, Stretto's own included. Every error names the file, the key, the value and a remedy."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from stretto.cost.cluster import Cluster
from stretto.cost.records import TableReader
from stretto.errors import UsageError, nearest
from stretto.options.checks import of_kind
from stretto.options.checks import path as check_path
from stretto.options.kinds import parse_toml
from stretto.system.destinations import writing

HOME = files("stretto.cost") / "clusters"
BY_NAME = ("products_in", "memory_of", "per_launch_of")  # of `Attained`
FORMER = ("indexed_numbers", "odd_products")  # keys of `Attained` that files of 0.2 may have: nothing asks for them now


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
    return TableReader("cluster", FORMER).record(Cluster, "", content)
