"""Plans for devices and links as they behave: bounds stay below prices, and the search finds the best of all."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from stretto.cost import find_cluster
from stretto.measure.layer_flops import layer_costs
from stretto.plan import Problem, search
from stretto.plan.bound import Bounds
from stretto.plan.branch_and_bound import plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.objective import Objective
from stretto.plan.plan_file import PARTS, split_computing
from stretto.plan.refine import refined, terms
from stretto.plan.search_space import candidates


@cache
def costs(width):
    import torch
    from torch import nn

    with torch.device("meta"):
        rows = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(5)]  # fmt: skip
        return layer_costs(rows, torch.randn(8, width))


def cluster(on_chip):
    one = find_cluster("70-nodes-of-8-a100")
    chip = {"on_chip_memory": on_chip, "on_chip_bandwidth": 2e13} if on_chip else {}
    return replace(
        one,
        groups=(replace(one.groups[0], nodes=2, workers=4),),
        devices={"a100": replace(one.devices["a100"], **chip)},
    )


@pytest.mark.parametrize(
    ("width", "on_chip", "products", "microbatches"),
    [
        (2048, 1.2e8, False, (8,)),
        *(pytest.param(*each, None, marks=pytest.mark.slow)
          for each in ((2048, 1.2e8, False), (64, None, False), (2048, None, False), (2048, None, True))),
    ],
)  # fmt: skip
def test_bounds_stay_below_prices_and_the_search_is_exact(width, on_chip, products, microbatches):
    problem = Problem(costs=costs(width), cluster=cluster(on_chip), workers=8, batch_sizes=(32,), optimizer="adam",
                      methods=("1f1b", "zb-h1", "zb-v", "interleaved", "backprop", "pb"),
                      weight_products=products, microbatches=microbatches)  # fmt: skip
    prices, aim, best = Prices(problem), Objective(), float("inf")
    bounds = Bounds(prices)
    for c in candidates(problem):
        plan = plan_of(c, aim, prices)
        if plan is None:
            continue
        assert bounds.seconds(c) <= plan.formula
        assert bounds.tighter(c) <= plan.formula
        best = min(best, plan.formula)
    assert search(problem).best.formula == best


def test_weight_gradients_as_products_make_a_split_backward_no_longer():
    twice = Problem(costs=costs(2048), cluster=cluster(None), workers=5, batch_sizes=(32,), optimizer="adam",
                    methods=("1f1b", "zb-h1"), pipelines=(5,), microbatches=(8,), recompute=("none",))  # fmt: skip
    chosen = {c.method: c for c in candidates(twice)}
    prices = Prices(twice.but(weight_products=True))
    plans = {name: plan_of(c, Objective(), prices) for name, c in chosen.items()}
    for s in range(1, 5):
        split, whole = (prices.stage(c, s) for c in (chosen["zb-h1"], chosen["1f1b"]))
        computing = split.backward - split.action_overhead, whole.backward - whole.action_overhead
        assert np.allclose(*computing, rtol=0.02), "but for messages of the runtime"
        slower = Prices(twice).stage(chosen["zb-h1"], s).backward > split.backward
        assert slower[1:, 1:][np.triu_indices(5, 1)].all(), "of stages that are not the first"
    seconds = {name: refined([plan], prices)[0].seconds for name, plan in plans.items()}
    assert seconds["zb-h1"] < seconds["1f1b"]
    assert refined([plan_of(chosen["zb-h1"], Objective(), Prices(twice))], Prices(twice))[0].seconds > seconds["zb-h1"]


def test_terms_say_where_computing_goes_and_add_up():
    problem = Problem(
        costs=costs(2048), cluster=cluster(None), workers=8, batch_sizes=(512,), pipelines=(1,), tensors=(1,)
    )
    found = search(problem)
    (plan,) = refined([found.best], found.prices)
    whole = terms(plan, found.prices)
    split = split_computing(whole, plan, found.prices)
    assert sum(split.values()) == pytest.approx(plan.seconds)
    assert sum(split[name] for name in PARTS) == pytest.approx(whole["computing"])
    assert all(split[name] > 0 for name in PARTS)
    flops = sum(layer.flops(kind).at(plan.candidate.examples) for layer in problem.layers for kind in "FB")
    spared = problem.layers[0].flops("B") - problem.layers[0].flops("W")  # the first layer's input needs no gradient
    peak = problem.cluster.devices["a100"].peak["float32"]
    assert split["computing"] == pytest.approx((flops - spared.at(plan.candidate.examples)) / peak, rel=0.1)
    ordinary = problem.but(cluster=find_cluster("16-workstations"), workers=1)
    found = search(ordinary)
    assert split_computing(whole, found.best, found.prices) == whole
