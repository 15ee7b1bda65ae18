"""A collective's seconds among other numbers of processes, and what a plan makes of measured ones."""

import pytest

from stretto import UsageError
from stretto.cost import Cluster, Device, Group, Link
from stretto.cost.collective import GRADIENTS, NAMES, RESHARDING, SHARDING, Collective
from stretto.cost.layer_table import Affine, LayerCost, ModelCosts, Work
from stretto.plan import Problem, search

MEASURED = Collective(processes=2, per_call=1e-3, per_tensor=2e-5, per_byte=1e-9)


def test_seconds_grow_as_those_of_a_ring():
    assert MEASURED.seconds(2, 1e6, tensors=4) == pytest.approx(1e-3 + 8e-5 + 1e-3)
    assert MEASURED.seconds(2, 1e6, calls=3) == pytest.approx(3e-3 + 1e-3)
    assert MEASURED.seconds(4, 1e6) == pytest.approx(3 * 1e-3 + 1e-3 * (3 / 4) / (1 / 2))
    slower = MEASURED.or_slower(Collective(processes=2, per_call=5e-4, per_byte=3e-9))
    assert (slower.per_call, slower.per_tensor, slower.per_byte) == (1e-3, 2e-5, 3e-9)


@pytest.mark.parametrize("wrong", [{"processes": 1}, {"per_call": -1.0}, {"per_byte": float("nan")}])
def test_what_no_collective_can_have(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Collective(**{"processes": 2, "per_call": 1e-3, "per_byte": 1e-9, **wrong})


def layer(number):
    work = (Work("linear", 1, Affine(0, 2e6), Affine(4e4, 1e3)),)
    none = Affine()
    return LayerCost(
        name=str(number), type="Linear", forward=work, backward=work, input_gradient=work, weight_gradient=work,
        differentiated=number > 0, parameters=10000, parameter_tensors=2, parameter_bytes=4e4, gradient_bytes=4e4,
        activation=Affine(0, 400), shared=none, input=Affine(0, 400), output=Affine(0, 400), loose_input=none,
        loose_output=none,
    )  # fmt: skip


def step(shard, collectives):
    link = Link(latency=1e-6, bandwidth=1e9, collectives=collectives)
    device = Device(memory=1e9, memory_bandwidth=1e10, peak={"float32": 1e11})
    cluster = Cluster(name="two", groups=(Group(nodes=1, workers=2, device="cpu", within="bus"),),
                      devices={"cpu": device}, links={"bus": link})  # fmt: skip
    problem = Problem(
        costs=ModelCosts(tuple(map(layer, range(4))), "float32"), cluster=cluster, workers=2, batch_sizes=(64,),
        all_workers=True, shards=(shard,), methods=("backprop",), tensors=(1,),
    )  # fmt: skip
    found = search(problem, among=lambda c: c.mesh.data == 2)
    return found.best.formula, found.best.candidate


def test_replicas_take_what_their_meetings_took():
    bare, _ = step("none", {})
    gradients = {GRADIENTS: MEASURED}
    seconds, candidate = step("none", gradients)
    assert candidate.mesh.data == 2
    ring = 2 * (1e-6 + 1.6e5 / 2 / 1e9) + 1.6e5 / 2 * 3 / 1e10
    assert seconds - bare == pytest.approx(1e-3 + 8 * 2e-5 + 1.6e5 * 1e-9 - ring)


def test_a_shared_out_optimizer_sends_what_a_sum_sends_and_updates_a_part():
    """On rings that is a scatter and a gather, as long as the sum; where sums were measured, it takes those."""
    update = 5 * 1.6e5 / 1e10  # of SGD: weights, gradients and momentum, read and written
    for known in ({}, {GRADIENTS: MEASURED}):
        whole, _ = step("none", known)
        shared, candidate = step("shard-optimizer", known)
        assert candidate.shard == "shard-optimizer"
        assert shared - whole == pytest.approx(-update / 2)


def test_sharded_weights_take_what_they_took_longer():
    longer = Collective(processes=2, per_call=2e-3, per_byte=0.0)
    known = {GRADIENTS: MEASURED, SHARDING: longer, RESHARDING: longer}
    whole, _ = step("none", known)
    sharded, candidate = step("fully-shard", known)
    assert candidate.shard == "fully-shard"
    update = 5 * 1.6e5 / 1e10  # of SGD: weights, gradients and momentum, read and written
    assert sharded - whole == pytest.approx(2e-3 - update / 2, rel=0.05)
    again, _ = step("fully-shard(reshard=True)", known)
    assert again == pytest.approx(sharded)
    assert set(known) < set(NAMES)
