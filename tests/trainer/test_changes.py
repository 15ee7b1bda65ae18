"""What is changed after a Trainer was made is honoured at the next step, as in a plain loop, or refused by name."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from stretto import UsageError
from stretto.trainer.changes import differs

X, Y = torch.linspace(-1, 1, 32).reshape(4, 8), torch.arange(4) % 3


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


class Tempered(nn.Module):
    """A traced forward between blocks that reads attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.temperature, self.epoch = 2.0, 0
        self.shift, self.factors, self.options = torch.zeros(3), [1.0, 2.0], SimpleNamespace(power=1, unread=0)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.finish(self.norm(x))

    def finish(self, x):
        return (self.head(x) / self.temperature + self.shift) ** self.options.power * self.factors[0]


def cut():
    model = Tempered()
    return model, stretto.split(model, 2, example=X)


def listed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return model, stretto.split(model, 2, example=X)


def trained(make, change):
    model, stages = make()
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, sgd)
    trainer.step(X, Y)
    change(model)
    trainer.step(X, Y)
    return model


def add_hook(model):
    model.register_forward_hook(lambda module, args, output: output * 2)


REFUSED = {
    "frozen": (
        listed,
        lambda model: model[0].requires_grad_(False),
        r"0\.0\.weight \(and 1 more\) requires no gradient",
    ),
    "an attribute": (cut, lambda model: setattr(model, "temperature", 3.0), r"Tempered has temperature=3\.0 now"),
    "a tensor": (cut, lambda model: setattr(model, "shift", torch.ones(3)), "Tempered has shift=another tensor now"),
    "a list": (cut, lambda model: setattr(model, "factors", [2.0]), r"factors=\[2\.0\] now, and had \[1\.0, 2\.0\]"),
    "an item": (cut, lambda model: model.factors.append(3.0), r"factors=\[1\.0, 2\.0, 3\.0\] now"),
    "an option": (cut, lambda model: setattr(model.options, "power", 2), "options of Tempered has power=2 now"),
    "all options": (cut, lambda model: setattr(model, "options", SimpleNamespace(power=2)), "options=namespace"),
    "a hook of the root": (cut, add_hook, "a hook was added to Tempered"),
    "a hook of a list": (listed, add_hook, "a hook was added to Sequential"),
    "a layer": (listed, lambda model: model.__setitem__(3, nn.Linear(8, 3)), "another Linear as '3'"),
    "a block": (cut, lambda model: setattr(model, "head", nn.Linear(8, 3)), "another Linear as 'head'"),
    "an inner module": (cut, lambda model: model.blocks.__setitem__(0, nn.Linear(8, 8)), "blocks of .*another Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_would_not_see_is_refused_by_name(name):
    make, change, said = REFUSED[name]
    with pytest.raises(UsageError, match=said):
        trained(make, change)


def test_a_frozen_layer_that_is_to_train_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    trainer = stretto.Trainer(list(model), nn.functional.cross_entropy, sgd)
    model[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"0\.weight \(and 1 more\) requires a gradient now"):
        trainer.step(X, Y)
    model[0].requires_grad_(False)
    trainer.step(X, Y)


def test_a_group_that_is_added_to_an_optimizer_is_refused():
    made = []

    def remembered(params):
        made.append(sgd(params))
        return made[-1]

    trainer = stretto.Trainer([nn.Linear(8, 3)], nn.functional.cross_entropy, remembered)
    made[0].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UsageError, match=r"2 groups of \[2, 1\] parameters now, and had \[2\]"):
        trainer.step(X, Y)


HONOURED = {
    "what no forward reads": lambda model: setattr(model, "epoch", 1),
    "an option that no forward reads": lambda model: setattr(model.options, "unread", 1),
    "a tensor in place": lambda model: model.shift.add_(1),
    "a hook of a block": lambda model: add_hook(model.blocks[0]),
    "a norm's momentum": lambda model: setattr(model.norm, "momentum", 0.5),
    "a norm in evaluation": lambda model: model.norm.eval(),
}


@pytest.mark.parametrize("name", HONOURED)
def test_what_a_step_sees_is_that_of_a_plain_loop(name):
    model, plain = trained(cut, HONOURED[name]), Tempered()
    optimizer = sgd(plain.parameters())
    for again in (False, True):
        if again:
            HONOURED[name](plain)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(X), Y).backward()
        optimizer.step()
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_hooks_of_an_nn_sequential_that_is_given_as_a_list_are_refused():
    model = copy.deepcopy(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    add_hook(model)
    with pytest.raises(UsageError, match=r"Sequential has hooks on modules .*add_hook.* of Sequential"):
        stretto.Trainer(model, nn.functional.cross_entropy, sgd)


def test_arrays_in_a_container_are_compared():
    assert differs([np.zeros(2)], [np.ones(2)])
    same = np.zeros(2)
    assert not differs([same], [same])
