"""Spike compensation of every optimizer equals the sums that define it, from fill to drain, also with prediction."""

from functools import partial

import numpy as np
import pytest
import torch

import stretto
from laws import late_rules
from laws.numpy_network import Network
from laws.step_rules import train_versions
from laws.test_step_cures import S, assert_weights, falling, modules, rate, run

WIDTHS = [6, 7, 6, 6, 6]  # no gradient has two singular values of 0, whose basis is anybody's
STEPS, BATCH = 13, 12
ADAM = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
MUON = {**ADAM, "momentum": 0.9}
OPTIMIZERS = {
    "sgd": (partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1), late_rules.LateSgd),
    "adamw": (partial(torch.optim.AdamW, **ADAM), late_rules.LateAdam),
    "nadam": (partial(torch.optim.NAdam, **ADAM, momentum_decay=0.1), late_rules.LateNAdam),
    "muon": (partial(stretto.optim.muon, **MUON), late_rules.LateMuon),
    "muon-without-nesterov": (partial(stretto.optim.muon, **MUON, nesterov=False), late_rules.LateMuonWithoutNesterov),
    "soap": (partial(stretto.optim.SOAP, **ADAM, every=3), late_rules.LateSoap),
    "lion": (partial(stretto.optim.Lion, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1), late_rules.LateLion),
}
METHODS = [("pb(spike=True)", {}), ("pb(spike=True, stash=True)", {"warmup": 3, "finish": 10}), ("pb-lwp-sc", {})]
CASES = [
    pytest.param(name, *method, marks=() if (i + j) % len(METHODS) == 0 else pytest.mark.slow)
    for i, name in enumerate(OPTIMIZERS)
    for j, method in enumerate(METHODS)
]


@pytest.fixture
def _numbers_of_64_bits():
    """NAdam's product of momenta has the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def batches():
    draw = np.random.default_rng(1)
    return [(draw.normal(size=(BATCH, WIDTHS[0])), draw.integers(0, WIDTHS[-1], BATCH)) for _ in range(STEPS)]


def delay(s):
    return 2 * (S - 1 - s)


@pytest.mark.usefixtures("_numbers_of_64_bits")
@pytest.mark.parametrize(("name", "method", "phases"), CASES)
def test_every_optimizer_equals_the_definition(name, method, phases):
    make, rule = OPTIMIZERS[name]
    network, data, rules = Network(WIDTHS), batches(), [rule(delay(s)) for s in range(S)]
    rules[-1].hidden = False
    versions, _, losses = train_versions(
        network, data, rules, lambda s, t: t - delay(s), rate=rate, stashed="stash" in method,
        horizon=delay if "lwp" in method else lambda s: 0, **phases,
    )  # fmt: skip
    chosen = stretto.method(method)
    trainer = stretto.Trainer(
        modules(network), torch.nn.functional.cross_entropy, make,
        stretto.method(chosen.name, **chosen.options, **phases), scheduler=falling, device="cpu",
    )  # fmt: skip
    np.testing.assert_allclose(run(trainer, data), losses, rtol=0, atol=1e-10)
    assert_weights(trainer, [each[-1] for each in versions])


@pytest.mark.parametrize(("rotate", "phases"), [(True, {"warmup": 3, "finish": 10}), ("one-sided", {})])
def test_in_a_rotated_basis(rotate, phases):
    """Synchronous phases go on in the basis, without the compensation."""
    network, data, sides = Network(WIDTHS), batches(), 2 if rotate is True else 1
    rules = [late_rules.LateRotated(delay(s), interval, sides) for s, interval in enumerate((2, 2, 4, 6))]
    versions, _, losses = train_versions(
        network, data, rules, lambda s, t: t - delay(s), rate=rate, stashed=False, **phases
    )
    trainer = stretto.Trainer(
        modules(network), torch.nn.functional.cross_entropy, OPTIMIZERS["adamw"][0],
        stretto.method("pb", spike=True, rotate=rotate, refresh=3, **phases), scheduler=falling, device="cpu",
    )  # fmt: skip
    np.testing.assert_allclose(run(trainer, data), losses, rtol=0, atol=1e-10)
    assert_weights(trainer, [each[-1] for each in versions])
