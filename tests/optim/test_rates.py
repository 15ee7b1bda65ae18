"""The rates to come are those that will be; nothing of the optimizer or its scheduler is touched by asking."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stretto.optim.learning_rates import FutureRates

STEPS = 24
SCHEDULERS = {
    "lambda": lambda made: lr_scheduler.LambdaLR(made, [lambda k: 1 / (1 + k), lambda k: 0.9**k]),
    "cosine": lambda made: lr_scheduler.CosineAnnealingLR(made, T_max=STEPS),
    "restarts": lambda made: lr_scheduler.CosineAnnealingWarmRestarts(made, T_0=7),
    "warm-up": lambda made: lr_scheduler.LinearLR(made, 1e-3, total_iters=9),
    "one-cycle": lambda made: lr_scheduler.OneCycleLR(made, [0.1, 0.2], total_steps=STEPS),
    "cyclic": lambda made: lr_scheduler.CyclicLR(made, 0.01, 0.1, step_size_up=4, cycle_momentum=True),
    "sequence": lambda made: lr_scheduler.SequentialLR(
        made, [lr_scheduler.ConstantLR(made, 0.1, 5), lr_scheduler.ExponentialLR(made, 0.9)], [5]
    ),
    "table": lambda made: lr_scheduler.LambdaLR(made, lambda k: [1.0 / (1 + i) for i in range(STEPS)][k]),
}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "sgd-fused": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "adam-tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.1)),
}


def made(kind):
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    return OPTIMIZERS[kind](
        [{"params": [one]}, {"params": [other], "lr": torch.tensor(0.5) if "tensor" in kind else 0.5}]
    )


def step(optimizer, scheduler):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_they_are_the_rates_that_come(name, kind):
    """Asked before each update for sums of several lengths, and held against what the real scheduler then sets."""
    optimizer = made(kind)
    rates = FutureRates(optimizer, SCHEDULERS[name])
    scheduler = SCHEDULERS[name](optimizer)
    found, real = [], []
    for update in range(STEPS):
        real.append([float(group["lr"]) for group in optimizer.param_groups])
        found.append([[rates.sum(group, update, ahead) for ahead in (0, 1, 2.25, 6)] for group in (0, 1)])
        if update < STEPS - 1:
            step(optimizer, scheduler)
    for update in range(STEPS - 6):
        for group in (0, 1):
            coming = [each[group] for each in real[update:]]
            wanted = [0, coming[0], coming[0] + coming[1] + 0.25 * coming[2], sum(coming[:6])]
            assert found[update][group] == pytest.approx(wanted, rel=1e-6 if "tensor" in kind else 1e-13)


@pytest.mark.parametrize(("name", "end"), [("one-cycle", STEPS), ("table", STEPS - 1)])
def test_where_a_schedule_ends_its_last_rate_stands(name, end):
    """So that a forward before the end may look beyond it; the real scheduler refuses to go there."""
    optimizer = made("sgd")
    rates = FutureRates(optimizer, SCHEDULERS[name])
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(end):
        step(optimizer, scheduler)
    last = optimizer.param_groups[0]["lr"]
    assert rates.sum(0, end, 5) == pytest.approx(5 * last)
    with pytest.raises((ValueError, IndexError)):
        scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_asking_changes_nothing(name):
    """The optimizer and its scheduler stand as where nobody asked, to the last entry; no warning is raised."""
    states = []
    for asks in (False, True):
        optimizer = made("sgd")
        rates = FutureRates(optimizer, SCHEDULERS[name])
        scheduler = SCHEDULERS[name](optimizer)
        for update in range(5):
            if asks:
                rates.sum(0, update, 9)
            step(optimizer, scheduler)
        states.append(copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()["last_epoch"])))
    assert str(states[0]) == str(states[1])


def test_without_a_scheduler_it_is_the_rate_of_now():
    optimizer = made("sgd")
    rates = FutureRates(optimizer)
    optimizer.param_groups[0]["lr"] = 0.3
    assert rates.sum(0, 7, 2.5) == pytest.approx(0.75)
    assert rates.sum(1, 7, 2) == 1.0


def test_a_rate_changed_by_hand_scales_what_comes():
    optimizer = made("sgd")
    rates = FutureRates(optimizer, lambda made: lr_scheduler.ExponentialLR(made, 0.5))
    lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.param_groups[0]["lr"] /= 10
    assert rates.sum(0, 0, 3) == pytest.approx(0.01 * (1 + 0.5 + 0.25))


def test_one_can_go_back_and_far_ahead():
    """As after loading a checkpoint."""
    optimizer = made("sgd")
    rates = FutureRates(optimizer, lambda made: lr_scheduler.ExponentialLR(made, 0.5))
    lr_scheduler.ExponentialLR(optimizer, 0.5)
    for update in (4, 0, 9, 2, 3, 30):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * 0.5**update
        assert rates.sum(1, update, 2) == pytest.approx(0.5 * 0.5**update * 1.5)


def test_memory_does_not_grow_with_updates():
    optimizer = made("sgd")
    rates = FutureRates(optimizer, SCHEDULERS["restarts"])
    for update in range(0, 1000, 7):
        rates.sum(0, update, 3)
        assert len(rates._window) <= 4
