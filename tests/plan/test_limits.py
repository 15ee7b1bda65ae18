"""Limits of a problem: every candidate keeps to them, none is lost, and a refusal names those that conflict."""

import itertools
from fractions import Fraction
from functools import cache

import pytest
from brute_force import step
from test_brute_force import draw, problem, way_of

from stretto.errors import UsageError
from stretto.plan import Objective, candidates, search
from stretto.plan.explain import LIMITS, conflict, misfit, possible, refusal, without

VALUES = {
    "pipelines": lambda c: c.pipeline, "data_parallels": lambda c: c.mesh.data, "tensors": lambda c: c.mesh.tensor,
    "spaces": lambda c: c.mesh.space, "shards": lambda c: c.shard, "stages": lambda c: c.stages,
}  # fmt: skip
SOME = {
    "pipelines": (1, 4), "data_parallels": (2,), "tensors": (1, 4), "spaces": ((1, 1), (2, 1)),
    "shards": ("none", "fully-shard"), "stages": (1, 2, 4),
}  # fmt: skip


def images(seed=3, **changes):
    n = draw(seed, workers=8) | {"per_node": 8, "batch": 8}
    return problem(n).but(**{"sides": (8,) * len(n["layers"]), "tensors": (1, 2, 4, 8), **changes})


@cache
def all_of_images():
    return list(candidates(images()))


@pytest.mark.parametrize("fields", list(itertools.combinations(VALUES, 2)), ids="-".join)
def test_limits_leave_exactly_the_candidates_that_keep_to_them(fields):
    every = all_of_images()
    limits = {field: SOME[field] for field in fields}
    kept = [c for c in every if all(VALUES[field](c) in limits[field] for field in fields)]
    assert list(candidates(images(**limits))) == kept
    assert 0 < len(kept) < len(every)


def test_tensor_sizes_that_are_named_may_be_any_and_cross_nodes():
    n = draw(3, workers=3) | {"per_node": 1, "batch": 3}
    assert {c.mesh.tensor for c in candidates(problem(n))} == {1}
    assert {c.mesh.tensor for c in candidates(problem(n).but(tensors=(3,)))} == {3}


@pytest.mark.parametrize(
    ("limits", "fields", "said"),
    [
        ({"pipelines": (3,)}, {"pipelines"}, "is the number of workers, 8 or a divisor of it. Possible instead: "
         "--pipeline 1 or 2"),
        ({"tensors": (3,)}, {"tensors"}, "--tensor 1 or 2 or 4 or 8"),
        ({"data_parallels": (1,), "shards": ("fully-shard",)}, {"data_parallels", "shards"},
         "--sharding fully-shard and --data-parallel 1: weights are sharded among replicas"),
        ({"methods": ("pb",), "shards": ("fully-shard",)}, {"methods", "shards"},
         "finish every minibatch before the next one (synchronous). Possible instead: --methods 1f1b"),
        ({"methods": ("greedy",), "pipelines": (1,)}, {"methods", "pipelines"}, "greedy has a pipeline of 2 or more"),
        ({"methods": ("backprop",), "pipelines": (2,), "data_parallels": (1, 2)}, {"methods", "pipelines"},
         "backprop has a pipeline of 1 worker"),
        ({"spaces": ((2, 2),), "tensors": (4,)}, {"spaces", "tensors"}, "x tensor x space is the number of workers, 8"),
        ({"spaces": ((2, 1),), "data_parallels": (2,), "shards": ("fully-shard",)}, {"spaces", "shards"},
         "space is not combined with sharding"),
        ({"tensors": (2,), "data_parallels": (2,), "shards": ("fully-shard",), "trained": True}, {"tensors", "shards"},
         "weights are cut (tensor) or sharded among replicas, not both"),
        ({"spaces": ((2, 1),), "sides": None}, {"spaces"}, "no layer of this model convolves or pools images"),
        ({"stages": (30,), "methods": ("1f1b", "backprop")}, {"stages"}, "a stage holds at least one of the"),
        ({"batch_sizes": (7,), "data_parallels": (4,)}, {"batch_sizes", "data_parallels"}, "--batch-size 8"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_limits_that_conflict_and_no_others(limits, fields, said):
    asked = images(**{"recompute": ("none",), **limits})
    found, freed = conflict(asked)
    assert {*found} == fields
    assert not possible(freed)
    assert all(possible(without(freed, field)) for field in found)
    assert said in misfit(asked)
    named = refusal(asked).split(" under ")[1].split(". Possible")[0]
    for field in {*LIMITS} - fields:
        assert f"{LIMITS[field].option} " not in named


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"shards": ("fullyshard",)}, "did you mean 'fully-shard'"),
        ({"spaces": ((2, 0),)}, "give pairs of whole numbers"),
        ({"pipelines": (0,)}, "pipelines lists 0"),
        ({"data_parallels": (-1,)}, "data_parallels lists -1"),
    ],
)
def test_limits_that_cannot_be(limits, said):
    with pytest.raises(UsageError, match=said):
        images(**limits)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "pb"])
def test_stages_begin_where_they_are_told_to(name):
    n = draw(6, workers=2, layers=5) | {"memory": 1 << 20}
    begins = (0, 1, 2, 4) if name == "interleaved" else (0, 3)
    asked = problem(n, (name,)).but(begins=begins, stages=(len(begins),))
    plan = search(asked).best
    assert plan.bounds == (*begins, len(n["layers"]))
    assert Fraction(plan.formula) == step(n, way_of(plan.candidate), plan.bounds)
    free = search(asked.but(begins=None)).best
    assert free.formula <= plan.formula
    assert search(asked, Objective(goal="memory")).best.bounds == plan.bounds


@pytest.mark.parametrize(
    ("begins", "stages", "said"),
    [
        ((1, 2), (2,), "begins lists 1 2: give the first layer of each stage, 0 for the first"),
        ((0, 2, 2), (3,), "begins lists 0 2 2"),
        ((0, 9), (2,), "of the model's layers 0 to 4"),
        ((0, 2), None, "begins lists 2 stages, and stages any number: they must be the same"),
    ],
)
def test_stages_that_cannot_begin_there_are_refused(begins, stages, said):
    with pytest.raises(UsageError, match=said):
        problem(draw(6, workers=2, layers=5)).but(begins=begins, stages=stages)
