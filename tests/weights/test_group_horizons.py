"""Groups of one optimizer with momenta of their own are predicted as far ahead as their own momentum carries."""

import warnings

import pytest
import torch
from torch import nn

import stretto

MOMENTA = (0.9, 0.5)


def decayed(momentum, delay):
    return sum(momentum**k for k in range(1, delay + 1))


def groups(params):
    matrices, biases = ([p for p in params if (p.dim() > 1) == large] for large in (True, False))
    parts = zip((matrices, biases), MOMENTA, strict=True)
    return torch.optim.SGD([{"params": part, "momentum": momentum} for part, momentum in parts], lr=0.1)


@pytest.mark.parametrize("form", ["velocity", "weight", "step"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_each_group_by_its_own_momentum(form, precision):
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)]
    method = f"pb(predict={form},horizon=decayed)"
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, groups, method, precision=precision)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for _ in range(9):
        trainer.step(x, y)
    optimizer, weights = trainer.optimizers[0], trainer._stages[0].weights
    predicted = weights.forward_values(None)
    for group, name in zip(optimizer.param_groups, ("weight", "bias"), strict=True):
        (master,) = group["params"]
        ahead = decayed(group["momentum"], 4)
        if form == "weight":
            rule = getattr(weights.forward_rule, "rule", weights.forward_rule)
            expected = master + ahead * (master - rule._former[name])
        else:
            expected = master - 0.1 * ahead * optimizer.state[master]["momentum_buffer"]
        tolerance = 1e-6 if precision is None else 1e-2
        torch.testing.assert_close(predicted[name].float(), expected.detach(), rtol=0, atol=tolerance)
    assert weights.ahead() == pytest.approx(decayed(0.9, 4))


def test_the_group_with_the_shortest_momentum_overshoots():
    with pytest.warns(UserWarning, match=r"10 updates ahead, but momentum 0.5 is gone after about 2"):
        stretto.Trainer([nn.Linear(2, 2)] * 1, nn.functional.mse_loss, groups, "pb(predict=velocity,horizon=10)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stretto.Trainer([nn.Linear(2, 2)], nn.functional.mse_loss, groups, "pb(predict=velocity,horizon=3)")
