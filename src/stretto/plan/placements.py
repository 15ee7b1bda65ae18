"""Which of a cluster's workers the processes of a mesh run on, where workers differ.

A placement lists a worker for each process, in the order of ranks. Equal workers are taken in their order. Of unequal
ones every placement is tried that may take another time, up to MANY arrangements. Where there are more, workers of one
kind stay together: kinds in every order, filled in replica by replica, or stage by stage.
"""

from collections.abc import Iterable, Iterator
from itertools import islice, permutations

from stretto.cost.cluster import Cluster
from stretto.mesh import Mesh, Placement
from stretto.plan.places import Places

Workers = tuple[int, ...]  # the worker of each process
IN_ORDER: Workers = ()  # the first workers of the cluster
MANY = 1000  # arrangements that are looked through
FEW = 256  # of those that may differ in time, so many are tried
MOST_KINDS = 4  # whose orders are all tried


def placements(cluster: Cluster, mesh: Mesh, pipeline: int) -> tuple[Workers, ...]:
    """The placements to try for pipelines of `pipeline` workers, those in order first."""
    if not cluster.is_uneven:
        return (IN_ORDER,)
    return every(cluster, mesh, pipeline) or different(by_kinds(cluster, mesh, pipeline), cluster, mesh, pipeline)


def is_exhaustive(cluster: Cluster, mesh: Mesh, pipeline: int) -> bool:
    """Whether `placements` has every placement that may take another time."""
    return cluster.is_uneven and every(cluster, mesh, pipeline) is not None


def every(cluster: Cluster, mesh: Mesh, pipeline: int) -> tuple[Workers, ...] | None:
    """Every placement that may take another time; None if there are too many."""
    listed = list(islice(arrangements(cluster, Placement(mesh, pipeline).size), MANY + 1))
    if len(listed) > MANY:
        return None
    distinct = different(listed, cluster, mesh, pipeline)
    return distinct if len(distinct) <= FEW else None


def arrangements(cluster: Cluster, size: int, taken: Workers = ()) -> Iterator[Workers]:
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


def by_kinds(cluster: Cluster, mesh: Mesh, pipeline: int) -> Iterator[Workers]:
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


def different(listed: Iterable[Workers], cluster: Cluster, mesh: Mesh, pipeline: int) -> tuple[Workers, ...]:
    """Of placements with the same devices and links, the first one."""
    first: dict[object, Workers] = {}
    for workers in listed:
        first.setdefault(Places.of(cluster, mesh, pipeline, workers).facts, workers)
    return tuple(first.values())
