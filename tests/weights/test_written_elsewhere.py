"""New weights written beside the old ones: the same bits as of a step on copies, and the old ones untouched."""

import copy

import pytest
import torch
from torch import nn

from stretto.weights import Stash
from stretto.weights.stash import LARGE, WritesElsewhere, is_known, step_elsewhere

WIDTH = 192  # 288 KiB of float64
assert LARGE < 8 * WIDTH**2

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd-maximize": lambda p: torch.optim.SGD(p, lr=0.05, maximize=True, dampening=0.2, momentum=0.5),
    "sgd-tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def train(make, wrap, scheduled=False):
    """Weights and the gradients of a pipeline of three versions in flight; `wrap` is what an update is given."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)).double()
    module.register_parameter("unused", nn.Parameter(torch.zeros(WIDTH, WIDTH)))  # no gradient: it stays where it is
    optimizer = make(list(module.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
    stash, flying, gradients = Stash(module), [], []
    for step in range(6):
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        flying.append((*stash.forward((x,)), copy.deepcopy(list(module.parameters()))))
        if step < 2:
            continue
        output, version, then = flying.pop(0)
        assert all(torch.equal(leaf, weight) for leaf, weight in zip(stash.leaves(version), then, strict=True))
        output.square().mean().backward()
        stash.collect(version)
        gradients += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        stash.update(wrap(optimizer))
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return [*gradients, *module.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_on_copies_to_the_last_bit(name):
    make = OPTIMIZERS[name]
    found = train(make, lambda optimizer: optimizer.step)
    wanted = train(make, lambda optimizer: lambda: optimizer.step())  # not known: the weights are copied
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_under_a_scheduler():
    found = train(OPTIMIZERS["sgd-decay"], lambda optimizer: optimizer.step, scheduled=True)
    wanted = train(OPTIMIZERS["sgd-decay"], lambda optimizer: lambda: optimizer.step(), scheduled=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_weights_are_not_copied(monkeypatch):
    copied = []
    monkeypatch.setattr("stretto.weights.stash.move", lambda parameter: copied.append(parameter.shape))
    weight, bias = nn.Parameter(torch.ones(WIDTH, WIDTH).double()), nn.Parameter(torch.ones(3))
    before, place = weight.data, weight.data_ptr()
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight, bias], lr=0.5)
    step_elsewhere([weight, bias], optimizer.step)
    assert copied == [bias.shape]
    assert weight.data_ptr() != place == before.data_ptr()
    assert bool((before == 1).all() and (weight == 0.5).all())


def test_whose_steps_are_known():
    parameters = [nn.Parameter(torch.ones(2))]

    class Own(torch.optim.SGD):
        pass

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    assert is_known(optimizer.step)
    assert not is_known(lambda: optimizer.step())
    assert not is_known(Own(parameters, lr=0.1).step)
    assert not is_known(torch.optim.LBFGS(parameters).step)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    assert not is_known(optimizer.step)
    hook.remove()
    assert is_known(optimizer.step)


def test_sparse_gradients():
    def step(known):
        weight = nn.Parameter(torch.ones(300, 64, dtype=torch.float64))
        before = weight.data
        weight.grad = torch.sparse_coo_tensor([[1, 5]], torch.ones(2, 64).double(), (300, 64))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        step_elsewhere([weight], optimizer.step if known else lambda: optimizer.step())
        assert bool((before == 1).all())
        return weight

    assert torch.equal(step(True), step(False))


def test_a_second_change_is_in_place():
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    before = weight.data
    with torch.no_grad(), WritesElsewhere([weight]):
        weight.mul_(2)
        place = weight.data_ptr()
        weight.add_(1)
    assert weight.data_ptr() == place
    assert bool((before == 1).all() and (weight == 3).all())
