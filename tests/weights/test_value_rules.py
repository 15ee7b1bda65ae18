"""Rules against their formulas, step by step; and who may use them."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from pairwise import paired
from stretto.errors import UsageError
from stretto.weights import (
    Correction,
    CurrentRule,
    Predicted,
    StepPrediction,
    Substituted,
    VelocityPrediction,
    WeightPrediction,
)


def scalar(value=1.0):
    parameter = nn.Parameter(torch.tensor([value], dtype=torch.float64))
    module = nn.Module()
    module.w = parameter
    return module, parameter


def updates(rule, module, parameter, gradients, optimizer):
    """The rule's value before the first update and after each."""
    weights = Predicted(module, rule)
    seen = [rule.value("w", parameter).item()]
    for gradient in gradients:
        parameter.grad = torch.full_like(parameter, gradient)
        weights.update(optimizer.step)
        seen.append(rule.value("w", parameter).item())
    return seen


GRADIENTS = [1.0, -2.0, 0.5, 3.0, -1.0]


def momentum(m=0.9, rate=0.1):
    """Weights and velocities, from the definition: v <- m v + g, w <- w - lr v."""
    w, v, history = 1.0, 0.0, [(1.0, 0.0)]
    for gradient in GRADIENTS:
        v = m * v + gradient
        w -= rate * v
        history.append((w, v))
    return history


@pytest.mark.parametrize("horizon", [0, 1, 4, 2.5, lambda updates: updates / 2], ids=["0", "1", "4", "2.5", "growing"])
@pytest.mark.parametrize("form", ["velocity", "weight"])
def test_prediction(form, horizon):
    """The two forms are equal for plain momentum: w_t - w_{t-1} = -lr v."""
    module, parameter = scalar()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    rule = VelocityPrediction(optimizer, horizon) if form == "velocity" else WeightPrediction(horizon)
    found = updates(rule, module, parameter, GRADIENTS, optimizer)
    ahead = horizon if callable(horizon) else lambda updates: horizon
    wanted = [w - 0.1 * ahead(t) * v for t, (w, v) in enumerate(momentum())]
    assert found == pytest.approx(wanted, rel=1e-13)


HALVED = torch.optim.lr_scheduler.ExponentialLR  # with gamma=0.5: rates whose sums are known


@pytest.mark.parametrize(
    ("kind", "horizon", "maximize", "halved"),
    paired(["sgd", "adam", "adamw", "amsgrad"], [0, 1, 4, 2.5], [False, True], [False, True]),
)
def test_prediction_along_the_step_is_what_steps_without_surprises_do(kind, horizon, maximize, halved):
    """h updates later, were the direction to stay: by the optimizer's own last step, scaled by the rates to come."""
    module, parameter = scalar()
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=maximize),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9), weight_decay=0.1, maximize=maximize),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.9), weight_decay=0.1, maximize=maximize),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9), amsgrad=True, maximize=maximize),
    }[kind]([parameter])

    def scheduler(made):
        return HALVED(made, gamma=0.5)

    rule = StepPrediction(optimizer, horizon, scheduler if halved else None)
    real = scheduler(optimizer) if halved else None
    weights = Predicted(module, rule)
    assert rule.value("w", parameter) is parameter
    for finished, gradient in enumerate(GRADIENTS, start=1):
        before, rate = parameter.item(), optimizer.param_groups[0]["lr"]
        parameter.grad = torch.full_like(parameter, gradient)
        weights.update(optimizer.step)
        after = parameter.item()
        if real is not None:
            real.step()
        direction = (before - after) / rate
        if kind == "adamw":  # its decay is of the weight as it stands
            direction += 0.1 * (after - before)
        ahead = [0.1 * (0.5 ** (finished + j) if halved else 1) * min(1, horizon - j) for j in range(5) if j < horizon]
        assert rule.value("w", parameter).item() == pytest.approx(after - sum(ahead) * direction, rel=1e-11)
    assert (rule.value("w", parameter) is parameter) == (horizon == 0)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.1)}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_prediction_along_the_step_whatever_the_kernel(make, options):
    values = []
    for chosen in ({}, options):
        module, parameter = scalar()
        optimizer = make([parameter], **{"lr": 0.1, **chosen})
        values.append(updates(StepPrediction(optimizer, 3), module, parameter, GRADIENTS, optimizer))
    assert values[0] == pytest.approx(values[1], rel=1e-7)


def test_prediction_along_the_step_knows_its_group():
    """Each weight's own rate, decay and betas; one that has had no gradient yet stays where it is."""
    slow, fast, idle = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3))
    groups = [{"params": [slow, idle]}, {"params": [fast], "lr": 1.0, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    rule = StepPrediction(optimizer, 2, lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.1))
    for parameter in (slow, fast):
        parameter.grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    rule.after({})
    with torch.no_grad():
        assert rule.value("idle", idle) is idle
        assert rule.value("slow", slow).item() == pytest.approx(0.85 - 0.011 / 0.01 * 0.1 * (1 + 0.5 * 0.85), rel=1e-6)
        assert rule.value("fast", fast).item() == pytest.approx(0.0 - 0.11 / 0.1 * 1.0, rel=1e-6)


def test_weight_prediction_takes_any_optimizer():
    module, parameter = scalar()
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    before = parameter.item()
    found = updates(WeightPrediction(3), module, parameter, [1.0], optimizer)
    assert found[1] == pytest.approx(parameter.item() + 3 * (parameter.item() - before), rel=1e-13)


@pytest.mark.parametrize("span", [0, 1, 4, 1.5])
@pytest.mark.parametrize("decay", [math.exp(-2), 0.5])
def test_correction(span, decay):
    module, parameter = scalar()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    found = updates(Correction(span, decay=decay), module, parameter, GRADIENTS, optimizer)
    history = [w for w, _ in momentum()]
    gamma = decay ** (1 / span) if span else 0
    delta, wanted = 0.0, [history[0]]
    for before, after in pairwise(history):
        delta = gamma * delta + (1 - gamma) * (after - before)
        wanted.append(after - span * delta)
    assert found == pytest.approx(wanted, rel=1e-13)


def test_a_correction_is_right_where_weights_move_evenly():
    """Once its average has settled: u is the weight of `span` updates ago."""
    module, parameter = scalar()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    found = updates(Correction(3), module, parameter, [1.0] * 60, optimizer)
    assert found[-1] == pytest.approx(parameter.item() + 3 * 0.1, rel=1e-9)


@pytest.mark.parametrize(
    "rule", [CurrentRule(), WeightPrediction(0), Correction(0), WeightPrediction(4), Correction(4)]
)
def test_nothing_is_copied_where_nothing_differs(rule):
    module, parameter = scalar()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert rule.value("w", parameter) is parameter
    updates(rule, module, parameter, GRADIENTS, optimizer)
    moves = getattr(rule, "horizon", 0) or getattr(rule, "span", 0)
    assert (rule.value("w", parameter) is parameter) == (not moves)
    kept = [value for key, value in rule.state_dict().items() if key != "updates"]
    assert any(kept) == bool(moves)


def test_velocity_reads_the_rate_of_the_weights_group_as_it_stands():
    slow, fast = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [slow]}, {"params": [fast], "lr": 1.0}], lr=0.1, momentum=0.5)
    rule = VelocityPrediction(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())  # which replaces the groups
    for parameter in (slow, fast):
        parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 2.0
    with torch.no_grad():
        assert rule.value("slow", slow).item() == pytest.approx(0.9 - 0.1)
        assert rule.value("fast", fast).item() == pytest.approx(0.0 - 2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adam(p), "this optimizer is Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "momentum=0"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening=0.1"),
    ],
)
def test_velocity_wants_plain_momentum(make, message):
    with pytest.raises(UsageError, match=rf"{message}.*method pipeoptim, or pb\(predict=weight\)"):
        VelocityPrediction(make([nn.Parameter(torch.ones(1))]), 1)


@pytest.mark.parametrize("settings", [{"span": -1}, {"span": 1, "decay": 0.0}, {"span": 1, "decay": 1.0}])
def test_a_correction_out_of_range(settings):
    with pytest.raises(UsageError, match="span"):
        Correction(**settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_keep_dtype_and_layout(dtype):
    layer = nn.Conv2d(3, 4, 3).to(dtype=dtype, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(2, 3, 5, 5, dtype=dtype, requires_grad=True)
    for ahead in (VelocityPrediction(optimizer, 2), WeightPrediction(2)):
        weights = Substituted(layer, ahead, Correction(2))
        for _ in range(3):
            output, version = weights.forward((inputs,))
            assert output.dtype == dtype
            output.sum().backward()
            weights.collect(version)
            weights.update(optimizer.step)
        for rule in (ahead, weights.backward_rule):
            with torch.no_grad():
                value = rule.value("weight", layer.weight)
            assert value is not layer.weight
            assert value.dtype == dtype
            assert value.stride() == layer.weight.stride()
