"""Scaling: each way keeps to its axes, perfect links scale perfectly, more workers are never slower."""

import pytest

from stretto.cost import Cluster, Device, Group, LayerCost, Link, ModelCosts, Rate, Work
from stretto.cost.layer_table import Affine
from stretto.errors import UsageError
from stretto.plan import Problem
from stretto.plan.scaling_study import batches, scaling

PIPELINED = ("backprop", "gpipe", "1f1b", "pb")


def layer(name):
    def work(flops):
        return (Work("linear", 1, Affine(0, flops), Affine()),)

    return LayerCost(
        name=name, type="Linear", forward=work(4), backward=work(8), input_gradient=work(4), weight_gradient=work(4),
        differentiated=True, parameters=8, parameter_tensors=1, parameter_bytes=32, gradient_bytes=32,
        activation=Affine(0, 4), shared=Affine(), input=Affine(0, 4), output=Affine(0, 4), loose_input=Affine(),
        loose_output=Affine(),
    )  # fmt: skip


def problem(latency=0.0, bandwidth=1e30, **changes):
    rate = Rate(per_flop=1.0)
    device = Device(
        memory=1e9, memory_bandwidth=1e30, reduction_bandwidth=1e30, peak={"float32": 1.0},
        rates={"linear": {"forward": rate, "backward": rate}, "sgd": {"update": Rate()}},
    )  # fmt: skip
    cluster = Cluster(
        name="c", devices={"d": device}, links={"l": Link(latency=latency, bandwidth=bandwidth)},
        groups=(Group(nodes=1, workers=2, device="d", within="l", between="l"),),
    )  # fmt: skip
    costs = ModelCosts(tuple(layer(str(k)) for k in range(4)), "float32")
    return Problem(costs=costs, cluster=cluster, workers=2, batch_sizes=(64,), tensors=(1,), **changes)


def by_way(rows, way):
    return {row.workers: row for row in rows if row.way == way}


def test_links_that_take_no_time_scale_perfectly_until_the_batch_is_used_up():
    found = by_way(scaling(problem(methods=("backprop",)), [1, 4, 64, 100]), "data parallel")
    for workers in (1, 4, 64):
        assert found[workers].efficiency == pytest.approx(1)
        assert found[workers].plan.candidate.workers == workers
        assert found[workers].utilisation == pytest.approx(found[1].utilisation)
    assert found[100].plan.candidate.workers == 64
    assert found[100].efficiency == pytest.approx(0.64)
    assert found[100].utilisation == pytest.approx(0.64 * found[1].utilisation)


def test_each_way_keeps_to_its_axes_and_hybrid_is_never_slower():
    rows = scaling(problem(latency=5.0, bandwidth=4.0, methods=PIPELINED), [1, 2, 4, 8])
    ways = {way: by_way(rows, way) for way in ("hybrid", "data parallel", "pipeline")}
    for workers in (1, 2, 4, 8):
        assert ways["data parallel"][workers].plan.candidate.pipeline == 1
        assert ways["pipeline"][workers].plan.candidate.mesh.data == 1
        for way in ("data parallel", "pipeline"):
            assert ways["hybrid"][workers].plan.formula <= ways[way][workers].plan.formula
    for way in ways.values():
        speeds = [way[workers].examples_per_second for workers in (1, 2, 4, 8)]
        assert speeds == sorted(speeds)
    assert ways["pipeline"][8].plan.candidate.workers == 4  # of four layers


def test_a_batch_of_each_worker_grows():
    found = by_way(scaling(problem(methods=("backprop",)), [1, 3], per_worker=True), "data parallel")
    assert (found[1].batch, found[3].batch) == (64, 192)
    assert found[3].examples_per_second == pytest.approx(3 * found[1].examples_per_second)


def test_utilisation_grows_with_the_batch_where_messages_cost():
    rows = [
        row
        for row in batches(problem(latency=50.0, bandwidth=4.0, methods=("backprop",)), 64)
        if row.way == "data parallel"
    ]
    assert [row.batch for row in rows] == [4, 16, 64, 256, 1024]
    shares = [row.utilisation for row in rows]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < shares[-1] <= 1


def test_what_cannot_be_scaled():
    with pytest.raises(UsageError, match="one batch size, not 32, 64"):
        scaling(problem().but(batch_sizes=(32, 64)), [1])
    with pytest.raises(UsageError, match="scale lists 0"):
        scaling(problem(), [0])
