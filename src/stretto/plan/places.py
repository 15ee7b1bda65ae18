"""The devices and links that a plan's stages run on: a cluster's workers, placed as a mesh places processes.

Which of a cluster's workers the processes of a mesh run on, where workers differ.

A placement lists a worker for each process, in the order of ranks. Equal workers are taken in their order. Of unequal
ones every placement is tried that may take another time, up to MANY arrangements. Where there are more, workers of one
kind stay together: kinds in every order, filled in replica by replica, or stage by stage.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import NamedTuple

from stretto.cost.cluster import Cluster, Link, WorkerKind
from stretto.cost.step_prediction import Workers
from stretto.mesh import Mesh, Placement


class DeviceKind(NamedTuple):
    """A kind of worker, and whether other workers of its node compute at the same time.

    Its work takes `slowest` times as long as on the mean device of its kind, since a step waits for the slowest one.
    """

    worker: WorkerKind
    crowded: bool
    slowest: float = 1.0

    @property
    def on_average(self) -> "DeviceKind":
        """The mean device of its kind."""
        return self._replace(slowest=1.0)


class Power(NamedTuple):
    """The watts of all workers while they wait, and how many more each worker of the pipeline uses while it is busy."""

    waiting: float
    more: tuple[float, ...]

    @classmethod
    def of(cls, cluster: Cluster, ranks: Sequence[Sequence[int]]) -> "Power | None":
        """The power of a pipeline whose workers are on these devices; None if that of one is not known."""
        busy, waiting = [cluster.watts(worker) for worker in ranks], [cluster.waiting_watts(worker) for worker in ranks]
        known = [
            (most, least) for most, least in zip(busy, waiting, strict=True) if most is not None and least is not None
        ]
        if len(known) < len(ranks):
            return None
        return cls(sum(least for _, least in known), tuple(most - least for most, least in known))


class Bill(NamedTuple):
    """What the workers of a plan cost: money an hour of all, and power; None where not known."""

    price: float | None
    power: Power | None

    @classmethod
    def of(cls, cluster: Cluster, pipeline: int, per_worker: int) -> "Bill":
        """Of the first workers of a cluster whose workers are alike, so many for each of a pipeline."""
        workers, power = range(pipeline * per_worker), None
        busy, waiting = cluster.watts(workers), cluster.waiting_watts(workers)
        if busy is not None and waiting is not None:
            power = Power(waiting, ((busy - waiting) / pipeline,) * pipeline)
        return cls(cluster.price_per_hour(workers), power)


@dataclass(frozen=True)
class Places:
    """The devices and links of each worker of a pipeline.

    Worker w runs on devices of the kinds `machines[w]`, with `memory[w]` bytes each. It sends to the next worker over
    `ahead[w]`, and reaches its replicas over `replicas[w]`, the other parts of its weights over `weights[w]` and the
    other slabs of its images over `slabs[w]`.
    """

    workers: Workers
    machines: tuple[tuple[DeviceKind, ...], ...]
    memory: tuple[float, ...]
    price: float | None  # money an hour of all workers; None if not known
    power: Power | None  # None if not known
    ahead: tuple[Link, ...]
    replicas: tuple[tuple[Link, ...], ...]
    weights: tuple[tuple[Link, ...], ...]
    slabs: tuple[tuple[Link, ...], ...]
    gamma: float  # seconds to add a byte

    @classmethod
    def of(cls, cluster: Cluster, mesh: Mesh, pipeline: int, placed: Sequence[int] = ()) -> "Places":
        """The places of a mesh of pipelines: process p is the worker placed[p] of a cluster, or worker p."""
        placement = Placement(mesh, pipeline)
        busy: Sequence[int] = placed or range(placement.size)
        crowded = dict(zip(busy, cluster.crowded(busy), strict=True))

        def on(processes: range) -> Sequence[int]:
            return [busy[process] for process in processes] if placed else processes

        replicas = [
            [on(placement.replica_range(worker, part)) for part in range(mesh.inside)] for worker in range(pipeline)
        ]
        ranks = tuple(
            tuple(rank for replica in range(mesh.data) for rank in on(placement.part_range(replica, worker)))
            for worker in range(pipeline)
        )
        workers = Workers(cluster, ranks)

        def inside(groups_of: Callable[[int, int], list[range]], length: int) -> list[list[Sequence[int]]]:
            if length == 1:
                return [[] for _ in range(pipeline)]
            return [
                [on(group) for replica in range(mesh.data) for group in groups_of(replica, worker)]
                for worker in range(pipeline)
            ]

        among = [dict.fromkeys((cluster.kinds[rank], crowded[rank]) for rank in own) for own in ranks]
        used = {kind: cluster.devices_by_kind[kind] for own in among for kind, _ in own}
        slowest = {kind: device.slowest_of(len(busy)) for kind, device in used.items()}

        def links_within(groups: Sequence[Sequence[int]]) -> tuple[Link, ...]:
            return distinct(link for group in groups if len(group) > 1 for link in cluster.collective_links(group))

        return cls(
            workers,
            tuple(tuple(DeviceKind(kind, many, slowest[kind]) for kind, many in own) for own in among),
            tuple(min(used[kind].memory for kind, _ in own) for own in among),
            cluster.price_per_hour(busy),
            Power.of(cluster, ranks),
            tuple(workers.link(w, (w + 1) % pipeline) for w in range(pipeline)) if pipeline > 1 else (),
            tuple(map(links_within, replicas)),
            tuple(map(links_within, inside(placement.weight_ranges, mesh.tensor))),
            tuple(map(links_within, inside(placement.slab_ranges, math.prod(mesh.space)))),
            max(device.reduction_seconds_per_byte for device in used.values()),
        )

    @property
    def facts(self) -> Hashable:
        """All that prices depend on: equal for two placements if every plan costs the same on both."""
        between = tuple(self.workers.link(*pair) for pair in permutations(range(self.workers.number), 2))
        axes = (self.replicas, self.weights, self.slabs)
        inside = tuple(tuple(frozenset(map(id, links)) for links in groups) for groups in axes)
        kinds = tuple(map(frozenset, self.machines))
        return kinds, self.memory, self.price, self.power, between, inside, self.gamma


def distinct(links: Iterable[Link]) -> tuple[Link, ...]:
    """The links without repetitions."""
    return tuple({id(link): link for link in links}.values())


Arrangement = tuple[int, ...]  # the worker of each process
IN_ORDER: Arrangement = ()  # the first workers of the cluster
MANY = 1000  # arrangements that are looked through
FEW = 256  # of those that may differ in time, so many are tried
MOST_KINDS = 4  # whose orders are all tried


def placements(cluster: Cluster, mesh: Mesh, pipeline: int) -> tuple[Arrangement, ...]:
    """The placements to try for pipelines of `pipeline` workers, those in order first."""
    if not cluster.is_uneven:
        return (IN_ORDER,)
    return every(cluster, mesh, pipeline) or different(by_kinds(cluster, mesh, pipeline), cluster, mesh, pipeline)


def is_exhaustive(cluster: Cluster, mesh: Mesh, pipeline: int) -> bool:
    """Whether `placements` has every placement that may take another time."""
    return cluster.is_uneven and every(cluster, mesh, pipeline) is not None


def every(cluster: Cluster, mesh: Mesh, pipeline: int) -> tuple[Arrangement, ...] | None:
    """Every placement that may take another time; None if there are too many."""
    listed = list(islice(arrangements(cluster, Placement(mesh, pipeline).size), MANY + 1))
    if len(listed) > MANY:
        return None
    distinct = different(listed, cluster, mesh, pipeline)
    return distinct if len(distinct) <= FEW else None


def arrangements(cluster: Cluster, size: int, taken: Arrangement = ()) -> Iterator[Arrangement]:
    """Every choice and order of `size` workers; of those that only swap equal nodes or workers, the first."""
    if len(taken) == size:
        yield taken
        return
    begun = {cluster.place(worker).node for worker in taken}
    seen = set()
    for worker in range(cluster.num_workers):
        if worker in taken:
            continue
        place, kind = cluster.place(worker), cluster.kinds[worker]
        alike = (place.node, kind) if place.node in begun else (-1 - place.group, kind)
        if alike not in seen:
            seen.add(alike)
            yield from arrangements(cluster, size, (*taken, worker))


def by_kinds(cluster: Cluster, mesh: Mesh, pipeline: int) -> Iterator[Arrangement]:
    """Placements that keep workers of one kind together."""
    of_kind = {
        kind: [worker for worker in range(cluster.num_workers) if cluster.kinds[worker] == kind]
        for kind in dict.fromkeys(cluster.kinds)
    }
    placement = Placement(mesh, pipeline)
    by_stage = sorted(range(placement.size), key=lambda rank: (placement.at(rank)[1], rank))
    orders = permutations(of_kind) if len(of_kind) <= MOST_KINDS else (tuple(of_kind), tuple(reversed(of_kind)))
    yield tuple(range(placement.size))
    for order in orders:
        workers = [worker for kind in order for worker in of_kind[kind]][: placement.size]
        yield tuple(workers)
        worker_of = dict(zip(by_stage, workers, strict=True))
        yield tuple(worker_of[rank] for rank in range(placement.size))


def different(listed: Iterable[Arrangement], cluster: Cluster, mesh: Mesh, pipeline: int) -> tuple[Arrangement, ...]:
    """Of placements with the same devices and links, the first one."""
    first: dict[object, Arrangement] = {}
    for workers in listed:
        first.setdefault(Places.of(cluster, mesh, pipeline, workers).facts, workers)
    return tuple(first.values())
