"""Delayed momentum SGD on quadratics, in theory: characteristic polynomials, and the recursion written out in numpy.

Along an eigenvector of curvature lam, with delay D, momentum m, rate eta and the gradient g_t taken at what a forward
saw D updates ago (Kosson et al. 2021, arXiv 2003.11666):

    v_{t+1} = m v_t + g_t        w_{t+1} = w_t - eta (a v_{t+1} + b g_t)        g_t = lam seen_{t-D}
    seen_t = w_t - eta h v_t (velocity form)   or   w_t + h (w_t - w_{t-1}) (weight form)

a, b = 1, 0 without spike compensation. With w_t = z^t this is p(z) = 0, and |w_t| falls as rho^t, rho the largest |z|.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """What is done about delay: spike compensation, and how far ahead a forward looks, given m and D, in which form."""

    spike: bool = False
    horizon: Callable[[float, int], float] = lambda m, D: 0
    form: str = "velocity"

    def coefficients(self, m, D):
        """a and b."""
        return (m**D, sum(m**k for k in range(D))) if self.spike else (1.0, 0.0)


def decayed(m, D):
    """m + m^2 + ... + m^D."""
    return sum(m**k for k in range(1, D + 1))


PLAIN = Rule()
SPIKE = Rule(spike=True)
AHEAD = Rule(horizon=lambda m, D: D)
AHEAD_WEIGHT = Rule(horizon=lambda m, D: D, form="weight")
AHEAD_TWICE = Rule(horizon=lambda m, D: 2 * D)
AHEAD_DECAYED = Rule(horizon=decayed)
BOTH_VELOCITY = Rule(spike=True, horizon=lambda m, D: D)
BOTH_WEIGHT = Rule(spike=True, horizon=lambda m, D: D, form="weight")


def polynomial(rule, D, m, eta, lam):
    """p, highest power first, of degree D+2 (velocity) or D+3 (weight). lam may be an array: one row each.

    velocity: z^D     (z-1)(z-m) + eta lam ((a+b) z - b m + h (z-1))
    weight:   z^(D+1) (z-1)(z-m) + eta lam ((a+b) z - b m) (z + h (z-1))
    """
    (a, b), h = rule.coefficients(m, D), rule.horizon(m, D)
    free = np.array([1, -(1 + m), m])
    if rule.form == "velocity":
        forced, power = np.array([a + b + h, -b * m - h]), D
    else:
        forced, power = np.polymul([a + b, -b * m], [1 + h, -h]), D + 1
    rate = np.atleast_1d(eta * np.asarray(lam, dtype=float))
    p = np.zeros((len(rate), power + 3))
    p[:, :3] = free
    p[:, -len(forced) :] += rate[:, None] * forced
    return p


def radius(p):
    """The largest |z| with p(z) = 0: one for each row."""
    degree = p.shape[-1] - 1
    companion = np.zeros((*p.shape[:-1], degree, degree))
    companion[..., 0, :] = -p[..., 1:]
    companion[..., range(1, degree), range(degree - 1)] = 1
    return np.abs(np.linalg.eigvals(companion)).max(-1)


def half_life(rho):
    """Updates until the error is halved; infinite where it does not fall."""
    with np.errstate(divide="ignore"):
        return np.where(rho < 1, np.log(2) / -np.log(np.minimum(rho, 1)), np.inf)


def best(rule, D, settings, curvatures):
    """The radius of the worst curvature, for the best of the settings [(m, eta)]; and that setting.

    Worst over three curvatures is a lower bound of worst over all: settings are tried in its order until none can win.
    """
    few = np.stack([polynomial(rule, D, m, eta, curvatures[[0, len(curvatures) // 2, -1]]) for m, eta in settings])
    bound = radius(few).max(-1)
    found, where = np.inf, None
    for i in np.argsort(bound):
        if bound[i] >= found:
            break
        worst = radius(polynomial(rule, D, *settings[i], curvatures)).max()
        if worst < found:
            found, where = worst, settings[i]
    return found, where


def trajectory(rule, D, m, eta, lam, start, updates):
    """w_0 .. w_updates [updates + 1, len(start)] of the recursion above; before update 0, w = start and v = 0."""
    (a, b), h = rule.coefficients(m, D), rule.horizon(m, D)
    w, v, seen = [np.array(start, dtype=float)], np.zeros(len(start)), []
    for t in range(updates):
        change = -eta * v if rule.form == "velocity" else w[-1] - w[max(0, t - 1)]
        seen.append(w[-1] + h * change)
        g = lam * seen[max(0, t - D)]
        v = m * v + g
        w.append(w[-1] - eta * (a * v + b * g))
    return np.array(w)
