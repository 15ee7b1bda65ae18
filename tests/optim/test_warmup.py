"""Warm-up against the sequence of rates that it is."""

import math

import pytest
import torch
from torch import nn

import stretto
from stretto import UsageError
from stretto.optim import cosine, warmup


def rates(factory, updates):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=8.0)
    scheduler, seen = factory(optimizer), []
    for _ in range(updates):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_equal_amounts_up_to_the_full_rate():
    assert rates(warmup(4), 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(warmup(3, start=0.25), 5) == pytest.approx([4.0, 6.0, 8.0, 8.0, 8.0])
    assert rates(warmup(0), 2) == [8.0, 8.0]


def test_half_a_cosine_afterwards():
    down = [8.0 * (1 + math.cos(math.pi * k / 3)) / 2 for k in range(4)]
    assert rates(warmup(2, then=cosine(3)), 7) == pytest.approx([4.0, 8.0, *down, 0.0])
    assert rates(warmup(0, then=cosine(3)), 3) == pytest.approx(down[:3])


def test_each_stage_of_a_trainer_warms_up():
    made = []

    def optimizer(parameters):
        made.append(torch.optim.SGD(parameters, lr=1.0))
        return made[-1]

    trainer = stretto.Trainer(
        [nn.Linear(2, 2), nn.Linear(2, 2)], nn.functional.mse_loss, optimizer, "1f1b", scheduler=warmup(4)
    )
    x = torch.ones(8, 2)
    for done in range(3):
        assert [each.param_groups[0]["lr"] for each in made] == [(done + 1) / 4] * 2
        trainer.step(x, x)


def test_predicted_steps_know_the_coming_rates():
    """What prediction along the step adds up is the schedule's."""
    from stretto.optim.learning_rates import FutureRates

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    coming = FutureRates(optimizer, warmup(4))
    warmup(4)(optimizer)
    assert coming.sum(0, 0, 3) == pytest.approx(0.25 + 0.5 + 0.75)


@pytest.mark.parametrize("wrong", [{"updates": -1}, {"updates": 2.5}, {"updates": True}, {"updates": 3, "start": 1.5}])
def test_nonsense(wrong):
    with pytest.raises(UsageError, match=r"updates=|start="):
        warmup(**wrong)
