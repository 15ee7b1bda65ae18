"""Limits of a problem: every candidate keeps to them, none is lost, and a refusal names those that conflict."""

import itertools

import pytest
from test_brute_force import draw, problem

from stretto.errors import UsageError
from stretto.plan import candidates
from stretto.plan.conflict import LIMITS, conflict, possible, refusal, without
from stretto.plan.explain import misfit

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


@pytest.mark.parametrize("fields", list(itertools.combinations(VALUES, 2)), ids="-".join)
def test_limits_leave_exactly_the_candidates_that_keep_to_them(fields):
    every = images()
    limits = {field: SOME[field] for field in fields}
    kept = [c for c in candidates(every) if all(VALUES[field](c) in limits[field] for field in fields)]
    assert list(candidates(every.but(**limits))) == kept
    assert 0 < len(kept) < len(list(candidates(every)))


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
    for field in {*LIMITS} - fields:
        assert f"{LIMITS[field].option} " not in refusal(asked).split(" under ")[1].split(". Possible")[0]


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
