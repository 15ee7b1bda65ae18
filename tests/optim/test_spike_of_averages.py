"""Spike compensation of averages: where it is the published rule, NAdam or Nesterov's momentum, and where nothing."""

from functools import partial

import pytest
import torch
from torch import nn

import stretto
from stretto import UsageError
from stretto.optim import SOAP, Lion, SpikeCompensation
from stretto.optim.spike_coefficients import corrected_coefficients, nesterov_coefficients

STEPS, ALL = 12, 1e15  # an eps beside which every square root is nothing
CONSTANT = {"lr": 0.01 * ALL, "eps": ALL}
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "muon": partial(stretto.optim.muon, lr=0.01, exclude=[]),
    "torch-muon": partial(torch.optim.Muon, lr=0.01),
    "soap": partial(SOAP, lr=0.01),
    "lion": partial(Lion, lr=0.01),
}


@pytest.fixture(autouse=True)
def _numbers_of_64_bits():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def gradients(number=STEPS):
    return torch.randn(number, 3, 4, generator=torch.Generator().manual_seed(0))


def run(make, given, delay=None):
    """Weights [len(given), 3, 4] after each step; without a delay, of the optimizer itself."""
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = make([parameter])
    step = optimizer.step if delay is None else SpikeCompensation(optimizer, delay).step
    seen = []
    for gradient in given:
        parameter.grad = gradient.clone()
        step()
        assert torch.equal(parameter.grad, gradient)
        assert all("delay" not in group for group in optimizer.param_groups)
        seen.append(parameter.detach().clone())
    return torch.stack(seen)


def close(one, other, atol=1e-12):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_delay_it_is_the_optimizer_to_the_bit(name):
    assert torch.equal(run(OPTIMIZERS[name], gradients(), 0), run(OPTIMIZERS[name], gradients()))
    assert not torch.equal(run(OPTIMIZERS[name], gradients(), 9), run(OPTIMIZERS[name], gradients()))


@pytest.mark.parametrize("delay", [1, 4, 9])
@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.Adam, **CONSTANT), partial(torch.optim.NAdam, **CONSTANT, momentum_decay=0.1),
     partial(SOAP, **CONSTANT, every=2, weight_decay=0.0)],
    ids=["adam", "nadam", "soap"],
)  # fmt: skip
def test_late_gradients_have_done_what_they_would_have_done_in_time(make, delay):
    """Under a constant denominator: after each, the weights of the optimizer that then got nothing for the delay."""
    given, nothing = gradients(), torch.zeros(delay, 3, 4)
    late = run(make, given, delay)
    for t in range(1, STEPS + 1):
        close(late[t - 1], run(make, torch.cat([given[:t], nothing]))[-1])


@pytest.mark.parametrize("delay", [1, 2, 7])
@pytest.mark.parametrize("decoupled", [True, False])
def test_nadam_is_adam_one_step_late(delay, decoupled):
    adam = partial(torch.optim.AdamW if decoupled else torch.optim.Adam, lr=0.01, weight_decay=0.1)
    nadam = partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1, momentum_decay=1e9, decoupled_weight_decay=decoupled)
    close(run(adam, gradients(), delay), run(nadam, gradients(), delay - 1))


@pytest.mark.parametrize("delay", [1, 5])
def test_adam_that_has_forgotten_its_beginning_is_sgds_published_rule(delay):
    """A constant denominator, and no correction left after a million steps."""

    def adam(parameters):
        made = torch.optim.Adam(parameters, **{**CONSTANT, "lr": 0.01 * ALL / (1 - 0.9)})
        made.state[parameters[0]] = {
            "step": torch.tensor(1e6), "exp_avg": torch.zeros(3, 4), "exp_avg_sq": torch.zeros(3, 4)
        }  # fmt: skip
        return made

    def scaled(parameters):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    close(run(adam, gradients(), delay), run(scaled, gradients(), delay))


def test_without_momentum_nothing_is_missed():
    make = partial(torch.optim.Adam, lr=0.01, betas=(0.0, 0.9))
    close(run(make, gradients(), 3), run(make, gradients()))


@pytest.mark.parametrize("late", [1, 4])
@pytest.mark.parametrize("make", [OPTIMIZERS["muon"], OPTIMIZERS["torch-muon"]], ids=["ours", "torchs"])
def test_nesterovs_momentum_is_muon_one_step_late(make, late):
    plain = partial(make, nesterov=False)
    assert torch.equal(run(plain, gradients(), late), run(make, gradients(), late - 1))


def test_lion_of_one_beta_late_for_long_follows_the_last_gradient():
    given = gradients()
    moves = run(partial(Lion, lr=0.01, betas=(0.9, 0.9)), given, 500).diff(dim=0)
    close(moves, -0.01 * given[1:].sign())


def test_maximizing_is_the_same_with_gradients_turned_round():
    for kind in (torch.optim.AdamW, torch.optim.NAdam):
        make = partial(kind, lr=0.01, weight_decay=0.0)
        assert torch.equal(run(partial(make, maximize=True), -gradients(), 3), run(make, gradients(), 3))


def test_fractions_of_an_update_lie_between_whole_ones():
    for coefficients in (
        partial(corrected_coefficients, 0.9, step=3), lambda delay: nesterov_coefficients(0.9, 0.1, 0.2, delay, 3),
    ):  # fmt: skip
        a, b = zip(*map(coefficients, (2, 2.5, 3)), strict=True)
        assert a[0] > a[1] > a[2]
        assert b[0] < b[1] < b[2]


def test_a_scheduler_counts_a_spiked_step_of_torchs_muon(recwarn):
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.Muon([parameter])
    rates = torch.optim.lr_scheduler.ConstantLR(optimizer)
    parameter.grad = torch.ones(3, 4)
    SpikeCompensation(optimizer, 2).step()
    rates.step()
    assert not recwarn.list


def test_other_optimizers_are_refused():
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(
        UsageError, match=r"takes Adam, .* and SOAP; of others it wants torch\.optim\.SGD .* is RMSprop"
    ):
        SpikeCompensation(torch.optim.RMSprop(parameters), 1)
    with pytest.raises(UsageError, match=r"of Adam is of real numbers"):
        SpikeCompensation(torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), 1)
