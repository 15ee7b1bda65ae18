"""The laws of delayed training on quadratics: in theory, and of the Trainer itself (Kosson et al. 2021).

The Trainer gets a first stage that holds w and returns it, S-1 stages that hand it on, and the loss sum(lam w^2) / 2.
The first stage's backward does not read w, so its gradient is lam times what its forward saw, with a stash or without.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from laws.quadratic import (
    AHEAD,
    AHEAD_DECAYED,
    AHEAD_TWICE,
    AHEAD_WEIGHT,
    BOTH_VELOCITY,
    BOTH_WEIGHT,
    PLAIN,
    SPIKE,
    best,
    decayed,
    half_life,
    polynomial,
    radius,
    trajectory,
)
from pairwise import in_turn, slow_where

SPECTRUM = np.geomspace(1 / 1000, 1, 61)

# -- the best half-lives at condition number 1000 -------------------------------------------------------------------

COLUMNS = (PLAIN, SPIKE, AHEAD, AHEAD_TWICE, BOTH_WEIGHT)
TABLE = {
    0: (127, 127, 127, 127, 127),
    1: (796, 127, 127, 128, 128),
    4: (2189, 377, 347, 159, 136),
    16: (8712, 2613, 2044, 1602, 1239),
}


@pytest.mark.parametrize("D", slow_where(lambda D: D == 16, TABLE))
def test_the_table_of_half_lives(D):
    """The project's table, every figure to its last digit; LWP+SC is the weight form (velocity: 159, 1602 at D 4, 16).

    It is the best of a coarse grid, not the optimum: the momenta below, eta/(1-m) in steps of 10^0.1 up to 10^0.6. That
    the grid ends there decides its first row, which is 11 in truth; see `test_the_optimum_of_half_lives`.
    """
    momenta, rates = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995), 10.0 ** (np.arange(-30, 7) / 10)
    grid = [(m, rate * (1 - m)) for m, rate in product(momenta, rates)]
    found = [float(half_life(best(rule, D, grid, SPECTRUM)[0])) for rule in COLUMNS]
    assert [round(each) for each in found] == list(TABLE[D])


# D: for each rule the half-life, m, eta. Momentum is of no use to plain momentum SGD once gradients are stale.
OPTIMUM = {
    0: {PLAIN: (10.96, 0.881145, 3.7585)},
    1: {
        PLAIN: (693.5, 0, 0.99792),
        SPIKE: (115.2, 0.9827701, 0.0677905),
        AHEAD: (107.4, 0.9822128, 0.0735218),
        AHEAD_TWICE: (43.51, 0.968908, 0.24963),
        BOTH_VELOCITY: (43.50, 0.968889, 0.24981),
        BOTH_WEIGHT: (37.85, 0.9643649, 0.329201),
    },
    4: {
        PLAIN: (1997, 0, 0.34651),
        SPIKE: (356.8, 0.9943926, 0.00712947),
        AHEAD: (331.7, 0.9941981, 0.00777078),
        AHEAD_TWICE: (133.0, 0.9897431, 0.0270176),
        BOTH_VELOCITY: (132.7, 0.9897239, 0.0271054),
        BOTH_WEIGHT: (109.5, 0.9875811, 0.0397877),
    },
    16: {
        PLAIN: (7289, 0, 0.094950),
        SPIKE: (1313, 0.9984726, 0.00052784),
        AHEAD: (1220, 0.9984191, 0.000575664),
        AHEAD_TWICE: (490.9, 0.9972143, 0.00198901),
        BOTH_VELOCITY: (490.0, 0.9972082, 0.00199676),
        BOTH_WEIGHT: (395.0, 0.9965454, 0.00307335),
    },
}


def around(m, eta):
    """Settings over four decades of 1-m and of eta/(1-m), and the neighbours of one."""
    wide = [(1 - u, u * rate) for u, rate in product(np.logspace(-4, 0, 17), np.logspace(-2, 2, 33))]
    near = np.array([0.9, 0.97, 0.99, 1, 1.01, 1.03, 1.1])
    return wide + [(1 - min(1, (1 - m) * u), eta * rate) for u, rate in product(near, near)]


@pytest.mark.parametrize("D", slow_where(lambda D: D > 1, OPTIMUM))
def test_the_optimum_of_half_lives(D):
    """What the best m and eta really give; no setting far or near is better. The order is that of the table above."""
    for rule, (expected, m, eta) in OPTIMUM[D].items():
        for spectrum in (SPECTRUM, np.geomspace(1 / 1000, 1, 601)):  # the first is dense enough
            worst = radius(polynomial(rule, D, m, eta, spectrum)).max()
            assert half_life(worst) == pytest.approx(expected, rel=2e-3)
        assert half_life(best(rule, D, around(m, eta), SPECTRUM)[0]) > 0.995 * expected
    found = [expected for expected, _, _ in OPTIMUM[D].values()]
    assert found == sorted(found, reverse=True)


def test_without_delay_the_optimum_is_polyaks():
    """Heavy ball: sqrt(m) = rho = (sqrt(k) - 1) / (sqrt(k) + 1); every cure is nothing without delay."""
    root = np.sqrt(1000)
    rho = (root - 1) / (root + 1)
    half, m, eta = OPTIMUM[0][PLAIN]
    assert half == pytest.approx(float(half_life(rho)), rel=1e-3)
    assert (m, eta) == pytest.approx((rho**2, (1 + rho) ** 2), rel=1e-4)
    for rule in (SPIKE, AHEAD, AHEAD_TWICE, BOTH_VELOCITY, AHEAD_DECAYED):
        np.testing.assert_array_equal(polynomial(rule, 0, m, eta, SPECTRUM), polynomial(PLAIN, 0, m, eta, SPECTRUM))


# -- the Trainer ----------------------------------------------------------------------------------------------------

LAM = np.geomspace(1 / 20, 1, 6)
START = np.array([1.0, -2.0, 0.5, 3.0, -1.0, 0.7])
SETTINGS = {0: (0.9, 0.3), 2: (0.9, 0.03), 4: (0.95, 0.01), 16: (0.95, 0.0025)}


class Point(nn.Module):
    """A vector of weights, returned."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return self.w * x


def descend(method, S, m, eta, lam, start, updates):
    """w after every update [updates + 1, n], w's delay being that of stage 0 of S."""
    trainer = stretto.Trainer(
        [Point(start), *[nn.Identity() for _ in range(S - 1)]],
        lambda output, curvature: (curvature * output**2).sum() / 2,
        lambda parameters: torch.optim.SGD(parameters, lr=eta, momentum=m), method, device="cpu",
    )  # fmt: skip
    ones, curvatures, w = torch.ones(1, len(lam), dtype=torch.float64), torch.tensor(lam)[None], trainer.stages[0].w
    D, seen = trainer.method.delays(trainer.schedule).steady[0], [w.detach().numpy().copy()]
    for _ in range(D + updates):
        trainer.step(ones, curvatures)
        seen.append(w.detach().numpy().copy())
    return np.array(seen[D:])


RULES = {
    "pb": PLAIN,
    "pb-sc": SPIKE,
    "pb(spike=True, stash=True)": SPIKE,
    "pb-lwp": AHEAD,
    "pb-lwp(horizon=2D)": AHEAD_TWICE,
    "pb-lwp(horizon=decayed)": AHEAD_DECAYED,
    "pb-lwpw": AHEAD_WEIGHT,
    "pb(predict=velocity, spike=True)": BOTH_VELOCITY,
    "pb-lwp-sc": BOTH_WEIGHT,
}


@cache
def pb(method, D):
    """`descend` with delay D, at the settings above; many times the delay."""
    m, eta = SETTINGS[D]
    return descend(method.replace("2D", str(2 * D)), D // 2 + 1, m, eta, LAM, START, 100)


def residual(p, w):
    """What is left of w [t] under the linear recurrence p: nothing, from the first update on."""
    return np.convolve(w, p, "valid")


def dominant(w):
    """The largest root of the recurrence of two terms that fits the end of w [t] best."""
    end = w[len(w) // 2 :]
    terms = np.linalg.lstsq(np.stack([end[1:-1], end[:-2]], axis=1), end[2:], rcond=None)[0]
    return radius(np.array([1, *-terms]))


@pytest.mark.parametrize(("method", "D"), in_turn(RULES, [2, 4, 0, 16], rounds=4, slow=3))
def test_the_trainer_descends_as_the_theory_says(method, D):
    """The recursion, update by update; its characteristic polynomial; and where one root is well ahead, the rate at
    which the recursion goes on."""
    m, eta = SETTINGS[D]
    w, longer = pb(method, D), trajectory(RULES[method], D, m, eta, LAM, START, 300)
    np.testing.assert_allclose(w, longer[: len(w)], rtol=0, atol=1e-10)
    p = polynomial(RULES[method], D, m, eta, LAM)
    assert max(np.abs(residual(*pair)).max() for pair in zip(p, w.T, strict=True)) < 1e-12
    measured = [np.log(dominant(each)) for each in longer.T[:3]]
    np.testing.assert_allclose(measured, np.log(radius(p[:3])), rtol=2e-3)


@pytest.mark.parametrize("S", [2, 4])
def test_pipedream_descends_as_the_theory_says(S):
    """Delay S-1 on the first stage: odd ones too."""
    w = descend("pipedream", S, 0.9, 0.02, LAM, START, 100)
    np.testing.assert_allclose(w, trajectory(PLAIN, S - 1, 0.9, 0.02, LAM, START, 100), rtol=0, atol=1e-10)


def test_theories_of_other_rules_or_delays_are_refused():
    """A check that cannot fail is none: every rule's polynomial is that of its own trajectory alone."""
    m, eta = SETTINGS[4]
    rules = {PLAIN, SPIKE, AHEAD, AHEAD_TWICE, BOTH_VELOCITY, BOTH_WEIGHT}
    for rule, D in product(rules, (4, 3)):
        w = trajectory(rule, D, m, eta, LAM, START, 300)
        for other in rules:
            left = np.abs(residual(polynomial(other, 4, m, eta, LAM)[-1], w[:, -1])).max()
            assert (left < 1e-12) == (other == rule and D == 4)


# -- prediction and spike compensation ------------------------------------------------------------------------------

MANY = list(product((0.5, 0.9, 0.99), (0, 1, 2, 7, 16), (0.01, 1.0)))


def test_the_two_forms_of_prediction_in_theory():
    """The weight form's polynomial is z times the velocity form's without spike compensation, and another with it."""
    for m, D, eta in MANY:
        for horizon in (AHEAD, AHEAD_WEIGHT), (BOTH_VELOCITY, BOTH_WEIGHT):
            velocity, weight = (polynomial(rule, D, m, eta, SPECTRUM) for rule in horizon)
            shifted = np.pad(velocity, ((0, 0), (0, 1)))
            if D == 0 or horizon[0] == AHEAD:
                np.testing.assert_allclose(weight, shifted, rtol=1e-12, atol=1e-14)
            else:
                assert np.abs(weight - shifted).max() > 1e-3 * eta


@pytest.mark.parametrize("D", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_the_two_forms_of_prediction_in_training(D):
    assert np.abs(pb("pb-lwp", D) - pb("pb-lwpw", D)).max() < 1e-13
    assert np.abs(pb("pb(predict=velocity, spike=True)", D) - pb("pb-lwp-sc", D)).max() > 1e-3


def test_spike_compensation_is_decayed_prediction_in_theory():
    """One characteristic polynomial: the same rates, at the same m and eta."""
    for m, D, eta in MANY:
        spike, ahead = (polynomial(rule, D, m, eta, SPECTRUM) for rule in (SPIKE, AHEAD_DECAYED))
        np.testing.assert_allclose(spike, ahead, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("D", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_spike_compensation_is_decayed_prediction_in_training(D):
    """Not the same weights: those of one are what the other predicts.

    With u = w - eta h v, h = m + ... + m^D, the step w <- w - eta v' is u <- u - eta (m^D v' + (1 + ... + m^(D-1)) g):
    spike compensation's, with gradients taken at u. From one start, v = 0, the two run alike for ever, fill included.
    """
    m, _ = SETTINGS[D]
    spike, w = pb("pb(spike=True, stash=True)", D), pb("pb(predict=velocity, horizon=decayed, stash=True)", D)
    change = np.diff(w, axis=0)  # -eta v
    np.testing.assert_allclose(spike[1:], w[1:] + decayed(m, D) * change, rtol=0, atol=1e-12)
    assert np.abs(spike - w).max() > 1e-2


def losses(method):
    """Of a network that is no quadratic, four stages."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(4)]
    trainer = stretto.Trainer(
        stages, nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), method, device="cpu",
    )  # fmt: skip
    batches = [(torch.randn(8, 5).double(), torch.randint(5, (8,))) for _ in range(20)]
    found = [trainer.step(*batch) for batch in batches]
    return np.array([each for each in found if each is not None] + trainer.flush())


def test_spike_compensation_is_decayed_prediction_on_any_loss():
    """Nothing above asked for a quadratic, only for a backward at the weights of its forward: without, they differ."""
    spike, ahead = "pb(spike=True{})", "pb(predict=velocity, horizon=decayed{})"
    stash = ", stash=True"
    assert np.abs(losses(spike.format(stash)) - losses(ahead.format(stash))).max() < 1e-12
    assert np.abs(losses(spike.format("")) - losses(ahead.format(""))).max() > 1e-5
    assert np.abs(losses(spike.format(stash)) - losses("pb(stash=True)")).max() > 1e-5


# -- stability of delayed gradient descent --------------------------------------------------------------------------


def bound(tau):
    """PipeMare (Yang et al. 2021, arXiv 1910.05124): the largest stable alpha lam."""
    return 2 * np.sin(np.pi / (4 * tau + 2))


@pytest.mark.parametrize("tau", slow_where(lambda tau: tau not in (0, 1, 2, 3, 7, 16, 39), range(40)))
def test_the_bound_of_stability_in_theory(tau):
    """Stable below, on the unit circle at the bound, unstable above; alpha / tau (T1) is stable if alpha lam < 1."""
    below, at, above = radius(polynomial(PLAIN, tau, 0, 1, bound(tau) * np.array([0.999, 1, 1.001])))
    assert below < 1 - 1e-6
    assert at == pytest.approx(1, abs=1e-9)
    assert above > 1 + 1e-6
    grid = np.linspace(0.01, 0.99, 50)
    assert radius(polynomial(PLAIN, tau, 0, 1, bound(tau) * grid)).max() < 1
    assert radius(polynomial(PLAIN, tau, 0, 1 / max(tau, 1), grid)).max() < 1


@pytest.mark.parametrize(
    ("tau", "method"),
    [(1, "pipedream"), (2, "pb"), *(pytest.param(tau, "pb", marks=pytest.mark.slow) for tau in (0, 6, 16))],
)
def test_the_bound_of_stability_in_training(tau, method):
    """A tenth below it converges, a tenth above it diverges: each by about e^2, and as fast as theory says."""
    lam = bound(tau) * np.array([0.9, 1.1])
    rates = np.log(radius(polynomial(PLAIN, tau, 0, 1, lam)))
    period = 2 * (2 * tau + 1)  # of the root on the circle, in updates
    between = max(20, round(2 / np.abs(rates).min()) // period * period)
    S = tau + 1 if method == "pipedream" else tau // 2 + 1
    w = np.abs(descend(method, S, 0, 1, lam, np.ones(2), between + 4 * period))
    early, late = w[2 * period : 4 * period].max(0), w[between + 2 * period :][: 2 * period].max(0)
    growth = np.log(late / early)
    np.testing.assert_allclose(growth, rates * between, rtol=0.1)
    assert growth[0] < -1 < 1 < growth[1]


@pytest.mark.parametrize("D", slow_where(lambda D: D > 2, [2, 6, 16]))
def test_rescheduling_keeps_delayed_descent_stable(D):
    """PipeMare's T1 at its start, alpha / tau: alpha lam = 0.95 then converges at any delay, and does not without."""
    lam, S, updates = np.array([0.95]), D // 2 + 1, 60 + 8 * D
    divided = descend("pipemare(reschedule=1000000000, correct=False)", S, 0, 1, lam, np.ones(1), updates)
    assert np.abs(divided[-D:]).max() < 0.05
    assert np.abs(descend("pb", S, 0, 1, lam, np.ones(1), updates)[-D:]).max() > 100
