"""Predictions corrected by measured steps: what is measured, whom a ratio concerns, and that searches stay exact."""

import random

import pytest
from test_brute_force import draw, problem, seeds
from test_refine import linear_problem

from stretto.plan import Objective, candidates, search
from stretto.plan.branch_and_bound import plan_of
from stretto.plan.candidate_costs import Prices
from stretto.plan.refine import refined, terms
from stretto.plan.ways import WAYS, correction, ways_of
from stretto.study.whole_steps import memory_groups, probes

RATIOS = {way: 1 + number / 8 for number, way in enumerate(WAYS)}


def test_every_axis_of_a_plan_is_a_way():
    known = {ways_of(c) for c in candidates(problem(draw(3, workers=4)).but(tensors=(1, 2)))}
    assert ("one worker",) in known
    assert ("replicas",) in known
    assert ("fully-shard", "pipeline") in known
    assert ("replicas", "stages with losses of their own") in known
    assert ("tensor", "pipeline without a drain") in known
    assert {way for ways in known for way in ways} <= set(WAYS)
    assert all(ways for ways in known)


def test_ratios_of_several_axes_are_multiplied():
    for c in candidates(problem(draw(3, workers=4))):
        expected = 1.0
        for way in ways_of(c):
            expected *= RATIOS[way]
        assert correction(c, RATIOS) == expected
        assert correction(c, {}) == 1


@pytest.mark.parametrize("seed", seeds((1, 2), 12))
def test_a_search_with_ratios_finds_the_best_of_all(seed):
    """Every candidate is priced without bounds, and its seconds multiplied here."""
    dice = random.Random(seed)
    ratios = {way: dice.choice([0.25, 0.5, 1, 1.5, 3]) for way in WAYS if dice.random() < 0.8}
    bare = problem(draw(seed))
    found = search(bare.but(ratios=ratios)).best
    every = [(plan_of(c, Objective(), Prices(bare)), c) for c in candidates(bare)]
    values = [plan.value * correction(c, ratios) for plan, c in every if plan is not None]
    assert (found is None) == (not values)
    if found is not None:
        assert found.value == pytest.approx(min(values), rel=1e-9)


def test_terms_add_up_to_corrected_seconds():
    corrected = linear_problem(None, "1f1b").but(ratios={"pipeline": 1.5}, pipelines=(3,))
    closed = search(corrected)
    (simulated,) = refined(closed.plans, closed.prices)
    for plan in (closed.plans[0], simulated):
        found = terms(plan, closed.prices)
        assert sum(found.values()) == pytest.approx(plan.seconds)
        assert found["correction"] == pytest.approx(plan.seconds / 3)


def test_one_plan_is_measured_for_each_way_whatever_the_limits_are():
    given = linear_problem([True] * 7, "1f1b")
    found = probes(given, 3)
    assert list(found) == [way for way in WAYS if way not in ("space", "replicas", *SHARDINGS, "tensor")]
    assert {way: ways_of(plan.candidate) for way, plan in found.items()} == {way: (way,) for way in found}
    assert [str(plan.candidate) for plan in found.values()] == ["backprop", "1f1b(microbatches=4)", "pb", "greedy"]
    limited = given.but(methods=("gpipe",), pipelines=(3,), microbatches=(2,), ratios=RATIOS)
    assert probes(limited, 3) == found
    divisible = probes(given.but(batch_sizes=(12, 6)), 3)
    assert set(divisible) == {way for way in WAYS if way not in ("space", "tensor")}
    assert {plan.candidate.batch for plan in divisible.values()} == {12}
    assert divisible["pipeline"].candidate.microbatches == 6


SHARDINGS = ("shard-optimizer", "fully-shard", "fully-shard(reshard=True)")


def test_what_does_not_fit_beside_others_is_measured_after_them():
    plans = probes(linear_problem(None, "1f1b").but(batch_sizes=(12,)), 3)
    needed = {way: max(plan.bytes) for way, plan in plans.items()}
    assert [list(group) for group in memory_groups(plans, sum(needed.values()))] == [list(plans)]
    assert [list(group) for group in memory_groups(plans, 1.0)] == [[way] for way in plans]
    halves = memory_groups(plans, sum(needed.values()) / 2)
    assert len(halves) > 1
    assert [way for group in halves for way in group] == list(plans)
    assert all(sum(needed[way] for way in group) <= sum(needed.values()) / 2 for group in halves)


def test_no_tensor_axis_is_measured_under_an_optimizer_of_whole_layers():
    given = problem(draw(5, workers=4))
    with_parts = given.but(tensor_costs={2: given.costs})
    under_muon = with_parts.but(optimizer="muon")
    assert {*probes(with_parts, 2)} - {*probes(under_muon, 2)} == {"tensor"}
