"""Law: what a state is built of comes back as it was, types, keys and bits, through JSON and tensors by name."""

import json
import threading

import pytest
import torch
from hypothesis import given
from torch import nn

from checkpoint.states import assert_same, states
from stretto.checkpoint.tree import empty_tensors, flatten, unflatten
from stretto.errors import UsageError


@given(states)
def test_a_state_comes_back(state):
    tree, tensors = flatten(state)
    tree = json.loads(json.dumps(tree))
    places = empty_tensors(tree)
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        place.copy_(tensors[name])
    assert_same(unflatten(tree, places), state)


def test_the_state_of_a_module_keeps_the_versions_of_its_parts():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = module.state_dict()
    found = unflatten(*flatten(state))
    assert found._metadata["1"] == {"version": 2}
    assert_same(found, state)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), betas=(0.8, 0.9)),
    lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.2, momentum=0.9),
    lambda p: torch.optim.Rprop(p),
])  # fmt: skip
def test_the_state_of_an_optimizer(make):
    module = nn.Linear(3, 2)
    optimizer = make(list(module.parameters()))
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert_same(unflatten(*flatten(state)), state)
    assert list(state["state"]) == [0, 1]


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=9),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
])  # fmt: skip
def test_the_state_of_a_scheduler(make):
    state = make(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)).state_dict()
    assert_same(unflatten(*flatten(state)), state)


def test_names_that_would_meet():
    state = {0: torch.tensor(1), "0": torch.tensor(2), "a": {"b": torch.tensor(3)}, "a.b": torch.tensor(4)}
    assert_same(unflatten(*flatten(state)), state)


@pytest.mark.parametrize(("value", "what"), [
    (threading.Lock(), "it is a lock"),
    (len, "it is a builtin_function_or_method"),
    (torch.ones(2).to_sparse(), "of layout torch.sparse_coo"),
    (torch.ones(2, device="meta"), "on meta"),
    (nn.Parameter(torch.ones(2)).as_subclass(type("Mine", (torch.Tensor,), {})), "it is a Mine"),
])  # fmt: skip
def test_what_cannot_be_kept_is_named(value, what):
    with pytest.raises(UsageError, match=rf"a checkpoint cannot hold optimizer\.param_groups\.0\.odd.*{what}"):
        flatten({"optimizer": {"param_groups": [{"odd": value}]}})


def test_an_object_without_a_tag_is_no_state():
    with pytest.raises(ValueError, match="without a tag"):
        unflatten({"dict": [["a", {}]]}, {})
