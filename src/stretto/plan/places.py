"""Which devices and links a plan's stages meet: read off the cluster, workers placed as a mesh places processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.cost.cluster import Cluster, Link
from stretto.cost.workers import Workers
from stretto.mesh import Mesh, Placement

Numbers = NDArray[np.float64]


class DeviceKind(NamedTuple):
    """A device by its name, and whether others on its node compute at the same time."""

    device: str
    crowded: bool


@dataclass(frozen=True)
class Places:
    """Of each worker of the pipeline: machines, memory, link to the next worker, links among replicas, among parts."""

    workers: Workers
    machines: tuple[tuple[DeviceKind, ...], ...]  # different ones only; the slowest counts
    memory: tuple[float, ...]
    price: float | None  # an hour, all of them
    ahead: tuple[Link, ...]
    replicas: tuple[tuple[Link, ...], ...]
    parts: tuple[tuple[Link, ...], ...]
    gamma: float  # seconds a byte that is added

    @classmethod
    def of(cls, cluster: Cluster, mesh: Mesh, pipeline: int) -> "Places":
        """On the first workers of a cluster."""
        placement = Placement(mesh, pipeline)
        busy = range(placement.size)
        crowded = cluster.crowded(busy)
        ranks = tuple(
            tuple(rank for replica in range(mesh.data) for rank in placement.parts_of(replica, worker))
            for worker in range(pipeline)
        )
        workers = Workers(cluster, ranks)
        groups = [[placement.replicas_of(worker, part) for part in range(mesh.inside)] for worker in range(pipeline)]
        inside = [[placement.parts_of(replica, worker) for replica in range(mesh.data)] for worker in range(pipeline)]

        def machines(own: Sequence[int]) -> tuple[DeviceKind, ...]:
            kinds = (DeviceKind(cluster.groups[cluster.place(rank).group].device, crowded[rank]) for rank in own)
            return tuple(dict.fromkeys(kinds))

        return cls(
            workers,
            tuple(machines(own) for own in ranks),
            tuple(min(cluster.device(rank).memory for rank in own) for own in ranks),
            cluster.price_per_hour(busy),
            tuple(workers.link(w, (w + 1) % pipeline) for w in range(pipeline)) if pipeline > 1 else (),
            tuple(distinct(link for among in each for link in cluster.links_among(among)) for each in groups),
            tuple(distinct(link for among in each for link in cluster.links_among(among)) for each in inside),
            max(cluster.device(rank).reduction_seconds_per_byte for rank in busy),
        )  # fmt: skip


def distinct(links: Iterable[Link]) -> tuple[Link, ...]:
    """Each link once."""
    return tuple({id(link): link for link in links}.values())


def message(link: Link | None, num_bytes: Numbers) -> Numbers:
    """What is left of a message between two workers while both ends compute; nothing where there is no link."""
    if link is None:
        return np.zeros_like(num_bytes)
    latency, per_byte = link.way
    return latency + num_bytes * per_byte


def sending(link: Link | None, num_bytes: Numbers) -> Numbers:
    """What a message takes of its sender."""
    return np.zeros_like(num_bytes) if link is None else link.send + num_bytes * link.send_per_byte


def receiving(link: Link | None, num_bytes: Numbers) -> Numbers:
    """What a message takes of its receiver."""
    return np.zeros_like(num_bytes) if link is None else link.receive + num_bytes * link.receive_per_byte


def gathering(links: Sequence[Link], among: int, num_bytes: Numbers) -> Numbers:
    """Half a ring: P-1 messages of N/P bytes, over the slowest link; nothing where there is nothing to gather."""
    if among == 1 or not links:
        return np.zeros_like(num_bytes)
    times = [(among - 1) * (link.latency + num_bytes / among / link.bandwidth) for link in links]
    return np.where(num_bytes > 0, np.maximum.reduce(times), 0.0)


def scattering(links: Sequence[Link], among: int, num_bytes: Numbers, gamma: float) -> Numbers:
    """The other half, which adds up."""
    return gathering(links, among, num_bytes) + (among - 1) / among * num_bytes * gamma


def all_reduce(links: Sequence[Link], among: int, num_bytes: Numbers, gamma: float) -> Numbers:
    """A ring: both halves."""
    return gathering(links, among, num_bytes) + scattering(links, among, num_bytes, gamma)
