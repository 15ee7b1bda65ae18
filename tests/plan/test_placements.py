"""Where the processes of a plan run on a cluster of unequal workers."""

from collections import Counter
from itertools import permutations

import pytest

from stretto.cost import Cluster, Device, Group, LayerCost, Link, ModelCosts, Work
from stretto.cost.layer_table import Affine
from stretto.mesh import Mesh
from stretto.plan import Problem, search
from stretto.plan.places import FEW, IN_ORDER, arrangements, is_exhaustive, placements


def cluster(*speeds, nodes=1, groups=1):
    """Groups of nodes of workers with these speeds, on links that take next to nothing."""
    group = Group(nodes=nodes, workers=len(speeds), device="cpu", speeds=speeds, within="free", between="free")
    device = Device(memory=1e9, memory_bandwidth=1e12, peak={"float32": 1e9})
    link = Link(latency=0.0, bandwidth=1e15)
    return Cluster(name="c", groups=(group,) * groups, devices={"cpu": device}, links={"free": link}, between="free")


def layers(number, flops=1e6):
    """Equal layers without weights; a backward takes twice a forward."""

    def work(count):
        return (Work("linear", 1, Affine(0, count), Affine()),)

    one = Affine(0, 1)
    row = LayerCost(
        name="0", type="Linear", forward=work(flops), backward=work(2 * flops), input_gradient=work(flops),
        weight_gradient=work(flops), differentiated=True, parameters=1, parameter_tensors=1, parameter_bytes=4,
        gradient_bytes=4, activation=one, shared=Affine(), input=one, output=one, loose_input=Affine(),
        loose_output=Affine(),
    )  # fmt: skip
    return ModelCosts((row,) * number, "float32")


def best(workers, number, **limits):
    """The candidate and the bounds of the best plan on all workers, or some."""
    count = workers.num_workers
    found = search(Problem(costs=layers(number), cluster=workers, workers=count, batch_sizes=(16,), **limits)).best
    assert found is not None
    return found.candidate, found.bounds


def test_equal_workers_are_taken_in_their_order():
    assert placements(cluster(1.0, 1.0, 1.0), Mesh(), 3) == (IN_ORDER,)
    assert placements(cluster(0.5, 0.5), Mesh(), 2) == (IN_ORDER,)


def test_arrangements_are_all_orders_but_for_equal_workers():
    """Of each order by kinds exactly one arrangement, and no kind is taken more often than it is there."""
    workers = cluster(1.0, 0.5, 1.0, 0.5)
    listed = list(arrangements(workers, 3))
    kinds = [tuple(workers.kinds[worker].speed for worker in each) for each in listed]
    assert max(Counter(kinds).values()) == 1
    assert {*kinds} == {tuple(workers.kinds[worker].speed for worker in each) for each in permutations(range(4), 3)}


def test_replicas_that_change_places_are_one_placement():
    assert len(placements(cluster(1.0, 0.5), Mesh(data=2), 1)) == 1
    assert len(placements(cluster(1.0, 0.5), Mesh(), 2)) == 2
    # Replicas have the same cut: the first stage on fast workers, the second one, or all on workers of both kinds.
    assert len(placements(cluster(1.0, 1.0, 0.5, 0.5), Mesh(data=2), 2)) == 3


def test_many_workers_keep_their_kinds_together():
    many = cluster(1.0, 0.5, nodes=32)
    found = placements(many, Mesh(data=8), 8)
    assert not is_exhaustive(many, Mesh(data=8), 8)
    assert 2 <= len(found) <= FEW
    assert all(sorted(each) == list(range(64)) for each in found)
    first = [{many.kinds[each[replica * 8]].speed for replica in range(8)} for each in found]
    assert {1.0} in first  # all replicas of the first stage on fast workers
    assert {0.5} in first


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (0.5, 1.0)])
def test_the_slow_worker_gets_fewer_layers(speeds):
    chosen, bounds = best(cluster(*speeds), 9, methods=("pb",), pipelines=(2,))
    by_worker = dict(zip(chosen.placement, (bounds[1], bounds[2] - bounds[1]), strict=True))
    assert by_worker[speeds.index(0.5)] == 3
    assert by_worker[speeds.index(1.0)] == 6


def test_a_single_worker_is_the_fastest():
    chosen, _ = best(cluster(0.25, 1.0, 0.5), 4, methods=("backprop",), pipelines=(1,), data_parallels=(1,))
    assert chosen.placement == (1,)


def test_replicas_of_a_stage_are_equally_fast():
    """Two replicas of two stages: the slow workers hold the same, smaller, stage."""
    workers = cluster(1.0, 0.5, 1.0, 0.5)
    chosen, bounds = best(workers, 6, methods=("pb",), pipelines=(2,), data_parallels=(2,))
    speeds = [workers.kinds[worker].speed for worker in chosen.placement]
    assert speeds[:2] == speeds[2:]
    sizes = [bounds[1], bounds[2] - bounds[1]]
    assert sizes[speeds.index(0.5)] == 2
