"""Plans that are simulated: by the very code of a forecast; and what their seconds are made of."""

from functools import cache
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from test_brute_force import draw, problem, seeds
from torch import nn
from torch.nn.functional import mse_loss

from forecasts import forecast
from stretto.cost import Cluster, Device, Group, Link, step_prediction
from stretto.cost.step_prediction import late_turn, turn_seconds
from stretto.errors import UsageError
from stretto.measure import layer_costs
from stretto.methods import method
from stretto.plan import Problem, candidate_costs, candidates, refine, search
from stretto.plan.branch_and_bound import plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.closed_forms import Passes
from stretto.plan.objective import Objective
from stretto.plan.plan_file import content
from stretto.plan.refine import LaidOut, plainest, pricer_of, refined, simulated, terms
from stretto.plan.ways import ways_of

WIDTH, BATCH = 32, 16
METHODS = (
    "backprop", "gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "looped-bfs", "pipedream", "pipedream-2bw", "paci",
    "pb", "pipedream(feedback=1)", "greedy", "chunked", "overlapping", "overlapping(delay=0)",
)  # fmt: skip


def calibrated(workers):
    device = Device(
        memory=1e9, memory_bandwidth=1e10, peak={"float32": 1e10}, per_action=3.1e-5, per_step=1.7e-4
    )  # fmt: skip
    link = Link(latency=2e-4, bandwidth=1e9, contention=1.1, send=3e-5, send_per_byte=1e-10, receive=7e-5)
    group = Group(nodes=1, workers=workers, device="d", within="l")
    return Cluster(name="c", groups=(group,), devices={"d": device}, links={"l": link})


def pricer(plan, prices):
    return pricer_of(plan, prices, LaidOut.of(plan, prices))


@cache
def linear_costs(number=7, width=WIDTH):
    layers, x = [nn.Linear(width, width) for _ in range(number)], torch.zeros(2, width)
    return layer_costs(layers, x, loss=mse_loss, target=x)


def linear_problem(heads, *names):
    costs = linear_costs()
    given = None if heads is None else tuple(costs.layers[0] if known else None for known in heads)
    return Problem(
        costs=costs, cluster=calibrated(3), workers=3, batch_sizes=(BATCH,), methods=names, heads=given,
        all_workers=True, optimizer="adam", microbatches=(1,),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["greedy", "chunked", "overlapping"])
def test_no_stage_with_a_loss_ends_where_there_can_be_no_head(name):
    """Inside an attention the rows of an exported graph's values are no examples, so no head can stand there."""
    three_stages = {"among": lambda c: c.pipeline == 3}
    places = [False, True, False, False, False, True, False]
    found = search(linear_problem(places, name), **three_stages)
    assert found.plans
    for plan in found.plans:
        after = plan.candidate.gradients.heads
        assert {end for stage, end in enumerate(plan.bounds[1:-1]) if stage in after} <= {2, 6}
    assert not search(linear_problem([False, False, True, *[False] * 4], "greedy"), **three_stages).plans


def test_local_methods_without_the_costs_of_heads_are_refused_where_they_are_named():
    for name in ("greedy", "local"):
        with pytest.raises(UsageError, match=f"no plan can have the methods {name}: .*no data"):
            linear_problem(None, "1f1b", name)
    assert "greedy" not in linear_problem(None, "all").names


@pytest.mark.parametrize("name", METHODS)
def test_a_plan_of_a_pipeline_takes_what_its_forecast_says(name):
    costs = linear_costs()
    heads = (costs.layers[0],) * 7
    workers = 1 if name == "backprop" else 3
    cluster = calibrated(workers)
    found = search(
        Problem(costs=costs, cluster=cluster, workers=workers, batch_sizes=(BATCH,), methods=(name,), heads=heads,
                all_workers=True, optimizer="adam"),
        among=lambda c: c.pipeline == workers,
    )  # fmt: skip
    (plan,) = refined(found.plans, found.prices)
    c = plan.candidate
    where = method(str(c)).reach(c.stages).heads[:-1]
    told = forecast(
        costs, [*plan.bounds[:-1], 8], cluster, str(c), BATCH, workers=workers, optimizer="adam",
        heads=[heads[0] if s in where else None for s in range(c.stages)],
    )  # fmt: skip
    assert plan.simulated
    assert plan.seconds == told.seconds > 0


@pytest.mark.parametrize("name", ["greedy", "chunked", "1f1b", "interleaved"])
def test_weight_gradients_as_products_change_only_what_is_split(name):
    """A stage that sends no gradient still runs whole backwards above its lowest weights, not their W alone."""
    costs = linear_costs()
    asked = Problem(costs=costs, cluster=calibrated(3), workers=3, batch_sizes=(BATCH,), methods=(name,),
                    heads=(costs.layers[0],) * 7, all_workers=True, optimizer="adam")  # fmt: skip
    both = [search(asked.but(weight_products=each), among=lambda c: c.pipeline == 3) for each in (False, True)]
    plain, products = (refined(found.plans, found.prices)[0] for found in both)
    assert plain.bounds == products.bounds
    assert (plain.formula, plain.seconds) == (products.formula, products.seconds)


@pytest.mark.parametrize("name", ["backprop", "zb-h1"])
def test_a_cost_effect_is_one_entry(name, monkeypatch):
    """What it adds reaches closed forms, simulated plans and both of their terms."""

    def with_checksums(prices, c, s, stage):
        nothing = np.zeros_like(stage.forward)
        half = Passes(nothing + 0.0005, nothing + 0.002, nothing + 0.0015)
        return stage.longer("runtime", half).longer("runtime", half)

    workers = 1 if name == "backprop" else 3
    asked = Problem(costs=linear_costs(), cluster=calibrated(workers), workers=workers, batch_sizes=(BATCH,),
                    methods=(name,), all_workers=True, optimizer="adam", microbatches=(4,))  # fmt: skip

    def told():
        found = search(asked, among=lambda c: c.pipeline == workers)
        (plan,) = refined(found.plans, found.prices)
        runtime = (terms(each, found.prices)["runtime"] for each in (found.plans[0], plan))
        return np.array([plan.formula, plan.seconds, *runtime])

    before = told()
    monkeypatch.setattr(candidate_costs, "EFFECTS", (with_checksums, *candidate_costs.EFFECTS))
    added = told() - before
    if name == "backprop":
        assert added == pytest.approx(0.005 * np.ones(4))
    assert (added >= (1 if name == "backprop" else 4) * 0.005 - 1e-9).all()


@pytest.mark.parametrize("seed", seeds((1, 2, 4, 6, 10), 40))
def test_terms_add_up_and_none_is_less_than_nothing(seed):
    found = search(problem(draw(seed)), keep=3)
    for plan in (*found.plans, *refined(found.plans, found.prices)):
        made = terms(plan, found.prices)
        assert sum(made.values()) == pytest.approx(plan.seconds)
        assert min(made.values()) >= -1e-7 * plan.seconds, made


def test_what_replicas_and_parts_tell_each_other_is_simulated_too():
    n = draw(3, workers=4) | {"per_node": 4, "memory": 1 << 20}
    for mesh in ((2, 1), (1, 2)):
        found = search(
            problem(n, ("1f1b",)), among=lambda c, m=mesh: (c.pipeline, c.mesh.data, c.mesh.tensor) == (2, *m)
        )
        (plan,) = refined(found.plans, found.prices)
        made = terms(plan, found.prices)
        assert (made["all-reduce"] > 0) == (mesh[0] > 1 or plan.candidate.sequence)  # which sums vectors' gradients
        assert (made["inside stages"] > 0) == (mesh[1] > 1)


def jittery(workers, memory=1e9):
    link = Link(latency=1e-4, bandwidth=1e9, late_share=0.15, late_seconds=2e-2)
    device = Device(memory=memory, memory_bandwidth=1e10, peak={"float32": 1e9})
    group = Group(nodes=1, workers=workers, device="d", within="l")
    return Cluster(name="c", groups=(group,), devices={"d": device}, links={"l": link})


def jittery_problem(cluster):
    return Problem(
        costs=linear_costs(8, 256), cluster=cluster, workers=2, batch_sizes=(256,), methods=("1f1b",), all_workers=True,
        optimizer="sgd", microbatches=(8,), pipelines=(2,), recompute=("none",), tensors=(1,),
    )  # fmt: skip


def test_plans_run_ahead_of_late_messages_as_far_as_memory_allows():
    found = search(jittery_problem(jittery(2)))
    (plan,) = found.plans
    (best,) = refined([plan], found.prices)
    assert best.candidate.ahead > 0
    assert f"ahead={best.candidate.ahead}" in str(best.candidate)
    usual = turn_seconds(pricer(plan, found.prices))
    assert best.seconds < 0.95 * usual
    assert best.seconds == turn_seconds(pricer(best, found.prices))  # the same draws in each call
    assert max(best.bytes) > max(plan.bytes)
    small = jittery_problem(jittery(2, max(plan.bytes) * 1.01))
    (fitting,) = refined(search(small).plans, search(small).prices)
    assert fitting.candidate.ahead == 0


def test_a_mean_over_draws_of_late_messages_is_told_with_its_standard_error(monkeypatch):
    monkeypatch.setattr(step_prediction, "MOST_LATE_TURNS", 8)  # of 64, to be quick
    found = search(jittery_problem(jittery(2)))
    plan = simulated(found.plans[0], found.prices)
    predicted = content(plan, found.prices, Objective(), model="decoder", trained=None)["predicted"]
    drawn = [late_turn(pricer(plan, found.prices), seed) for seed in range(8)]
    assert predicted["seconds_per_step"] == fmean(drawn)
    assert predicted["standard_error"] == pytest.approx(stdev(drawn) / 8**0.5)
    assert predicted["by"] == "simulation, mean of 8 draws of late messages"


def test_plans_do_not_run_ahead_where_no_message_is_late():
    found = search(linear_problem(None, "1f1b").but(microbatches=(8,), pipelines=(3,)))
    assert all(plan.candidate.ahead == 0 for plan in refined(found.plans, found.prices))


def test_within_the_spread_of_what_was_measured_the_plainest_plan_wins(monkeypatch):
    """Recomputed from every candidate: fewest workers, then the candidate that comes first."""
    bare = linear_problem(None, "synchronous").but(all_workers=False, batch_sizes=(6144,), recompute=("none",))
    best = refined(search(bare, keep=4).plans, Prices(bare))[0]
    assert best.candidate.workers > 1
    assert plainest(best, Objective(), Prices(bare)) == best
    every = [(c, plan) for c in candidates(bare) if (plan := plan_of(c, Objective(), Prices(bare))) is not None]
    slower = sorted({simulated(plan, Prices(bare)).value / best.value for c, plan in every if c.workers == 1})[0]
    disturbed = bare.but(spreads=dict.fromkeys(ways_of(best.candidate), 0.9))
    assert plainest(best, Objective(), Prices(disturbed)).value <= 1.2 * best.value < slower * best.value
    monkeypatch.setattr(refine, "EQUAL_WITHIN", 9.0)
    for spread, workers in ((slower - 1 - 1e-9, {2, 3}), (slower - 1 + 1e-9, {1})):
        given = bare.but(spreads=dict.fromkeys(ways_of(best.candidate), spread))
        found = plainest(best, Objective(), Prices(given))
        assert found.candidate.workers in workers
        assert found.value <= best.value * (1 + spread)
        assert found.simulated
        equal = [c for c, plan in every if simulated(plan, Prices(bare)).value <= best.value * (1 + spread)]
        assert found.candidate == min(equal, key=lambda c: c.order)
