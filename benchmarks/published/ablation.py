"""Copies of a cluster's file without one term of the model. The product reads the copy; nothing in it is hooked."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from stretto.cost.cluster_file import find_cluster, to_dict

FREE = 1e30  # bytes/s and FLOP/s that take no time


def peak_rates(cluster: dict[str, Any]) -> None:
    """Products at the data sheet's peak, whatever their size; all else as the roofline has it."""
    for device in cluster["devices"].values():
        device["rates"] = {}


def no_launches(cluster: dict[str, Any]) -> None:
    """No time to start an operator, an action or a step."""
    for device in cluster["devices"].values():
        device |= {"per_action": 0.0, "per_step": 0.0}
        for rates in device["rates"].values():
            for rate in rates.values():
                rate["per_call"] = 0.0


def no_traffic(cluster: dict[str, Any]) -> None:
    """Memory that is read and written in no time."""
    for device in cluster["devices"].values():
        device["memory_bandwidth"] = FREE
        for rates in device["rates"].values():
            for rate in rates.values():
                rate["per_byte"] = 0.0


def no_latency(cluster: dict[str, Any]) -> None:
    """Messages and collectives that take their bytes' time only."""
    for link in cluster["links"].values():
        link["latency"] = 0.0


def no_messages(cluster: dict[str, Any]) -> None:
    """Messages and collectives in no time."""
    no_latency(cluster)
    for link in cluster["links"].values():
        link["bandwidth"] = FREE


def no_contention(cluster: dict[str, Any]) -> None:
    """Computing and communicating that do not slow each other."""
    for link in cluster["links"].values():
        link["contention"] = 1.0
    for device in cluster["devices"].values():
        for rates in device["rates"].values():
            for rate in rates.values():
                rate["contention"] = 1.0


TERMS: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "attained rates": peak_rates,
    "launches": no_launches,
    "memory traffic": no_traffic,
    "latency of messages": no_latency,
    "messages": no_messages,
    "contention": no_contention,
}


def without(term: str, cluster: str, folder: Path) -> str:
    """The path of a copy of a cluster without a term of `TERMS`, in `folder`."""
    content = to_dict(find_cluster(cluster))
    TERMS[term](content)
    file = folder / f"{Path(cluster).stem} without {term}.toml"
    file.write_text(tomli_w.dumps(content))
    return str(file)
