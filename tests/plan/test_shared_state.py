"""An optimizer's state that replicas share out, against the figures of the paper that named it."""

import pytest

from stretto.cost import Cluster, Device, Group, LayerCost, Link, ModelCosts
from stretto.cost.layer_table import Affine
from stretto.mesh import Mesh
from stretto.plan import Candidate, Problem
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


@pytest.mark.parametrize(
    ("shard", "gigabytes"), [("none", 120), ("shard-optimizer", 31.4), ("fully-shard(reshard=True)", 1.88 + 7.5)]
)
def test_bytes_of_model_states_are_those_of_the_paper(shard, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 replicas, Adam with 16-bit weights, K = 12.

    Weights that are shared out as well take two gathered layers here, a quarter of the model each, which the paper
    leaves out.
    """
    cluster = Cluster(
        name="many", groups=(Group(nodes=64, workers=1, device="gpu", between="net"),),
        devices={"gpu": Device(memory=2e11, memory_bandwidth=1e12, peak={"bfloat16": 1e14})},
        links={"net": Link(latency=1e-6, bandwidth=1e10)}, between="net",
    )  # fmt: skip
    problem = Problem(
        costs=ModelCosts(tuple(map(layer, range(4))), "bfloat16"), cluster=cluster, workers=64, batch_sizes=(64,),
        optimizer="adam", masters=True,
    )  # fmt: skip
    prices, c = Prices(problem), Candidate(1, Mesh(data=64), 64, shard=shard)
    (stage,) = prices.stages_at(c, (0, 4))
    assert float(stage.static_bytes) / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert Bounds(prices).bytes(c) <= float(stage.static_bytes)
