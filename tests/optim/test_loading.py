"""An optimizer goes on from its state as if nothing had been, whatever the types of its numbers."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from stretto.optim.loading import load

OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    partial(torch.optim.ASGD, lambd=0.1, t0=2), torch.optim.Rprop, torch.optim.RMSprop,
]  # fmt: skip


def steps(parameter, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for _ in range(number):
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_going_on_is_not_having_stopped(kind, dtype):
    weights = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype))
    optimizer = kind([weights])
    steps(weights, optimizer, 5)
    state, others = copy.deepcopy(optimizer.state_dict()), nn.Parameter(weights.detach().clone())
    fresh = kind([others])
    load(fresh, state)
    types = [{key: getattr(value, "dtype", None) for key, value in each.items()} for each in state["state"].values()]
    steps(weights, optimizer, 7)
    steps(others, fresh, 7)
    assert torch.equal(weights, others)
    loaded = fresh.state_dict()["state"].values()
    assert [{key: getattr(value, "dtype", None) for key, value in each.items()} for each in loaded] == types


def test_a_network_of_a_wider_type_goes_on():
    narrow, wide = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).double())
    optimizer, fresh = (torch.optim.Adam([each]) for each in (narrow, wide))
    steps(narrow, optimizer, 2)
    load(fresh, optimizer.state_dict())
    assert fresh.state[wide]["exp_avg"].dtype == torch.float64
    steps(wide, fresh, 2)
