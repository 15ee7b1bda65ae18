"""Copies of a cluster's file without one term of the model. The product reads the copy; nothing in it is hooked."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from stretto.cost.cluster_file import find_cluster, to_dict

FREE = 1e30  # bytes/s that take no time
Tables = Mapping[str, Any]


def attained(cluster: Tables) -> Iterator[dict[str, Any]]:
    """What each device attains."""
    return (device["attained"] for device in cluster["devices"].values() if "attained" in device)


def protocols(link: dict[str, Any]) -> list[dict[str, Any]]:
    """The ways in which a link's collectives run."""
    return [*link.get("rings", {}).values(), *([link["tree"]] if "tree" in link else [])]


def at_peak(cluster: Tables) -> None:
    """Products, convolutions, attention and memory at the data sheet's peaks, whatever their sizes."""
    for shares in attained(cluster):
        shares |= {"products": 1.0, "convolutions": 1.0, "attention": 1.0, "memory": 1.0}
        for key in ("products_in", "attention_2022", "memory_of"):
            shares.pop(key, None)
    of_any_size(cluster)


def of_any_size(cluster: Tables) -> None:
    """Products of all sizes at the rate of large ones."""
    for shares in attained(cluster):
        shares.pop("multiprocessors", None)
        shares.pop("cache_bandwidth", None)


def as_copies(cluster: Tables) -> None:
    """Layer norms, sums over rows and GELU by erf as quick as a copy."""
    for shares in attained(cluster):
        shares.pop("memory_of", None)


def all_alike(cluster: Tables) -> None:
    """No device slower than others of its kind."""
    for device in cluster["devices"].values():
        device.pop("variation", None)


def no_launches(cluster: Tables) -> None:
    """No time to start a kernel, neither on the device nor on its host."""
    no_hosts(cluster)
    for shares in attained(cluster):
        shares["per_kernel"] = 0.0


def no_hosts(cluster: Tables) -> None:
    """Kernels that are there when the device is ready for them."""
    for shares in attained(cluster):
        shares |= {"per_launch": 0.0, "per_gradient": 0.0, "per_reduction": 0.0, "per_update": 0.0}
        shares.pop("per_launch_of", None)


def no_traffic(cluster: Tables) -> None:
    """Memory that is read and written in no time."""
    for device in cluster["devices"].values():
        device["memory_bandwidth"] = FREE


def no_latency(cluster: Tables) -> None:
    """Messages and collectives that take their bytes' time only."""
    for link in cluster["links"].values():
        link["latency"] = 0.0
        for protocol in protocols(link):
            protocol |= {"base": 0.0, "step": 0.0}


def no_protocols(cluster: Tables) -> None:
    """Collectives as so many messages, each with a link's latency and bandwidth."""
    for link in cluster["links"].values():
        link.pop("rings", None)
        link.pop("tree", None)


def no_messages(cluster: Tables) -> None:
    """Messages and collectives in no time."""
    no_latency(cluster)
    no_contention(cluster)
    for link in cluster["links"].values():
        for part in (link, *protocols(link)):
            part["bandwidth"] = FREE


def no_contention(cluster: Tables) -> None:
    """Messages that take nothing from computing, and computing that takes nothing from messages."""
    for link in cluster["links"].values():
        link |= {"contention": 1.0, "send": 0.0, "receive": 0.0, "send_per_byte": 0.0, "receive_per_byte": 0.0}


TERMS: Mapping[str, Callable[[Tables], None]] = {
    "attained rates (peaks instead)": at_peak,
    "sizes of products": of_any_size,
    "kinds of kernels": as_copies,
    "slowest of devices": all_alike,
    "starting kernels": no_launches,
    "hosts": no_hosts,
    "memory traffic": no_traffic,
    "latency of messages": no_latency,
    "protocols of collectives": no_protocols,
    "all messages": no_messages,
    "contention": no_contention,
}


def without(term: Callable[[Tables], None], cluster: str, folder: Path) -> str:
    """The path of a copy of a cluster, in `folder`, from which a function as those of `TERMS` has taken a term."""
    content = to_dict(find_cluster(cluster))
    term(content)
    file = folder / f"{Path(cluster).stem}.toml"
    file.write_text(tomli_w.dumps(content))
    return str(file)
