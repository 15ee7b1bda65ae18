"""An optimizer's state that replicas share out, against the figures of the paper that named it."""

import pytest

from stretto.cost import Cluster, Device, Group, LayerCost, Link, ModelCosts
from stretto.cost.layer_table import Affine, TiedLayers
from stretto.mesh import Mesh
from stretto.plan import Candidate, Problem, candidates
from stretto.plan.bound import Bounds
from stretto.plan.candidate_costs import Prices

BILLIONS = 7.5  # of parameters


def layer(number):
    none, parameters = Affine(), int(BILLIONS / 4 * 1e9)
    return LayerCost(
        name=str(number), type="Linear", forward=(), backward=(), input_gradient=(), weight_gradient=(),
        differentiated=number > 0, parameters=parameters, parameter_tensors=1, parameter_bytes=2.0 * parameters,
        gradient_bytes=2.0 * parameters, activation=none, shared=none, input=none, output=none, loose_input=none,
        loose_output=none,
    )  # fmt: skip


def prices_of(ties=()):
    cluster = Cluster(
        name="many", groups=(Group(nodes=64, workers=1, device="gpu", between="net"),),
        devices={"gpu": Device(memory=2e11, memory_bandwidth=1e12, peak={"bfloat16": 1e14})},
        links={"net": Link(latency=1e-6, bandwidth=1e10)}, between="net",
    )  # fmt: skip
    return Prices(Problem(
        costs=ModelCosts(tuple(map(layer, range(4))), "bfloat16", ties=ties), cluster=cluster, workers=64,
        batch_sizes=(64,), optimizer="adam", masters=True, weight_products=True,
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("shard", "gigabytes"), [("none", 120), ("shard-optimizer", 31.4), ("fully-shard(reshard=True)", 1.88 + 7.5)]
)
def test_bytes_of_model_states_are_those_of_the_paper(shard, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 replicas, Adam with 16-bit weights, K = 12.

    Weights that are shared out as well take two gathered layers here, a quarter of the model each, which the paper
    leaves out.
    """
    prices, c = prices_of(), Candidate(1, Mesh(data=64), 64, shard=shard)
    (stage,) = prices.stages_at(c, (0, 4))
    assert float(stage.static_bytes) / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert Bounds(prices).memory.of_candidate(c) <= float(stage.static_bytes)


def test_layers_of_one_stage_keep_what_they_share_once():
    """2 bytes of a weight, 2 of its gradient and 12 of state for each number; between two stages both have all."""
    size = 1e9
    alone, tied = (prices_of(ties) for ties in ((), (TiedLayers((0, 3), size),)))
    c = Candidate(1, Mesh(data=64), 64)
    (one,), (other,) = (prices.stages_at(c, (0, 4)) for prices in (alone, tied))
    assert float(one.static_bytes - other.static_bytes) == pytest.approx(16 / 2 * size)
    assert float(one.all_reduce) > float(other.all_reduce)
    assert Bounds(tied).memory.of_candidate(c) <= float(other.static_bytes)
    c = Candidate(2, Mesh(data=32), 64, method="1f1b", microbatches=2)
    pairs = zip(alone.stages_at(c, (0, 2, 4)), tied.stages_at(c, (0, 2, 4)), strict=True)
    assert all(float(one.static_bytes) == float(other.static_bytes) for one, other in pairs)


def test_tied_weights_of_several_stages_allow_a_shared_out_optimizer_alone():
    problem = prices_of((TiedLayers((0, 3), 1e9),)).problem.but(pipelines=(2,), data_parallels=(32,))
    found = {c.shard for c in candidates(problem)}
    assert found == {"none", "shard-optimizer"}
