"""Spike compensation's law, on the step itself: late gradients have done what they would have done in time."""

import pytest
import torch
from torch import nn

from pairwise import slow_where
from stretto.optim import SpikeCompensation

MOMENTUM, LR, STEPS = 0.9, 0.1, 40
SETTINGS = [{}, {"maximize": True}, {"foreach": True}, {"foreach": False}]


def run(gradients, delay=None, **options):
    """Weights [len(gradients), 3] after each step; without a delay, of torch's optimizer itself."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=LR, **{"momentum": MOMENTUM, **options})
    step = optimizer.step if delay is None else SpikeCompensation(optimizer, delay).step
    seen = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step()
        seen.append(parameter.detach().clone())
    return torch.stack(seen)


def impulse(at, steps):
    gradients = torch.zeros(steps, 3, dtype=torch.float64)
    gradients[at] = torch.tensor([1.0, 2.0, -3.0])
    return gradients


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("momentum", slow_where(lambda momentum: momentum != MOMENTUM, [0.5, 0.9, 0.99]))
@pytest.mark.parametrize("delay", [0, 1, 2, 4, 16])
def test_one_gradient_from_its_arrival_on(delay, momentum, options):
    """It arrives `delay` steps late; from then on, the weights are those of momentum SGD that got it in time."""
    late = run(impulse(delay, STEPS), delay, momentum=momentum, **options)
    in_time = run(impulse(0, STEPS), momentum=momentum, **options)
    assert torch.equal(late[:delay], late[:1].expand(delay, 3))  # nothing before
    torch.testing.assert_close(late[delay:], in_time[delay:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("delay", [1, 2, 4, 16])
def test_many_gradients_without_those_that_are_on_their_way(delay):
    """At every time: momentum SGD without delay, had it got nothing since the last gradient that has arrived."""
    gradients = torch.randn(STEPS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(delay, 3, dtype=torch.float64)
    late = run(torch.cat([nothing, gradients]), delay)
    for t in range(STEPS):
        arrived = torch.cat([gradients[: t + 1], nothing])
        torch.testing.assert_close(late[t + delay], run(arrived)[-1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [*SETTINGS, {"weight_decay": 0.01}, {"weight_decay": 0.01, "maximize": True}])
def test_one_step_late_is_nesterovs(options):
    """As torch.optim.SGD(nesterov=True) has it; in float64, to the last bits."""
    gradients = torch.randn(STEPS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        run(gradients, 1, **options), run(gradients, nesterov=True, **options), rtol=1e-14, atol=2e-15
    )
