"""Spike compensation by its definition: numerators as sums over all gradients that there were, each with its own count.

`kernel(step, k)` is how much the gradient of a step counts in the numerator k steps later. A late one counts on arrival
for all the steps that it missed. No line of it is shared with what it checks.
"""

import math

import numpy as np
import torch

from laws.step_rules import Rotated
from optim.test_muon import newton_schulz


class Late:
    """A stage's rule; `plain` steps are those without a delay."""

    coupled = False

    def __init__(self, delay, decay=0.1):
        self.delay, self.decay, self.plain, self.gradients = delay, decay, False, []

    def move(self, w, g, rate):
        if self.coupled:
            g = [each + self.decay * x for each, x in zip(g, w, strict=True)]
        self.gradients.append(g)
        kept = [0.0 if self.coupled else rate * self.decay * x for x in w]
        return [rate * self.step(i, x.shape) + kept[i] for i, x in enumerate(w)]

    def series(self, i):
        return [each[i] for each in self.gradients]

    def numerator(self, kernel, series):
        """Of the step whose gradient is the last of a series."""
        t, late = len(series), 0 if self.plain else self.delay
        before = sum(kernel(j, t - j + late) * g for j, g in enumerate(series[:-1], start=1))
        return before + sum(kernel(t, k) for k in range(late + 1)) * series[-1]

    def step(self, i, shape):
        return self.numerator(self.kernel, self.series(i))


class LateSgd(Late):
    coupled = True

    def kernel(self, step, k):
        return 0.9**k


class LateAdam(Late):
    betas, eps = (0.9, 0.95), 1e-6

    def kernel(self, step, k):
        b1 = self.betas[0]
        return (1 - b1) * b1**k / (1 - b1 ** (step + k))

    def denominator(self, series):
        t, b2 = len(series), self.betas[1]
        return np.sqrt(sum((1 - b2) * b2 ** (t - j) * g**2 for j, g in enumerate(series, 1)) / (1 - b2**t)) + self.eps

    def step(self, i, shape):
        return super().step(i, shape) / self.denominator(self.series(i))


class LateNAdam(LateAdam):
    coupled = True

    def kernel(self, step, k):
        b1 = self.betas[0]
        mu = [b1 * (1 - 0.5 * 0.96 ** (number * 0.1)) for number in range(1, step + k + 2)]
        own = (1 - mu[step - 1]) / (1 - math.prod(mu[:step])) if k == 0 else 0.0
        return own + mu[-1] / (1 - math.prod(mu)) * (1 - b1) * b1**k


class LateMuon(LateAdam):
    """Nesterov's momentum of the hidden layers' matrices; the others' rule is AdamW's, and so is the last stage's."""

    hidden, nesterov = True, True

    def looking(self, step, k):
        average = (1 - 0.9) * 0.9**k
        return (1 - 0.9) * (k == 0) + 0.9 * average if self.nesterov else average

    def step(self, i, shape):
        if not self.hidden or len(shape) == 1:
            return super().step(i, shape)
        found = newton_schulz(torch.tensor(self.numerator(self.looking, self.series(i))))
        return 0.2 * math.sqrt(max(shape)) * found.double().numpy()


class LateMuonWithoutNesterov(LateMuon):
    nesterov = False


class LateLion(Late):
    def kernel(self, step, k):
        return 1 - 0.9 if k == 0 else 0.9 * (1 - 0.95) * 0.95 ** (k - 1)

    def step(self, i, shape):
        return np.sign(super().step(i, shape))


class LateRotated(Rotated):
    def __init__(self, delay, interval, sides):
        super().__init__(interval, sides)
        self.late, self.series, self.plain = LateAdam(delay), {}, False

    def numerator(self, i, first, g):
        self.series.setdefault(i, []).append(g)
        self.late.plain = self.plain
        return self.late.numerator(self.late.kernel, self.series[i])


class LateSoap(LateAdam):
    """Bases from the first gradient, which moves nothing; new ones after every third step."""

    def __init__(self, delay, decay=0.1):
        super().__init__(delay, decay)
        self.bases, self.second = {}, None

    def move(self, w, g, rate):
        moves = super().move(w, g, rate)
        return [np.zeros_like(w[0]), moves[1]] if len(self.gradients) == 1 else moves

    def correlation(self, i, side):
        both = [g @ g.T if side == 0 else g.T @ g for g in self.series(i)]
        b2 = self.betas[1]
        return sum((1 - b2) * b2 ** (len(both) - 1 - j) * each for j, each in enumerate(both))

    def step(self, i, shape):
        if len(shape) == 1:
            return super().step(i, shape)
        if len(self.gradients) == 1:
            self.bases = {side: np.linalg.eigh(self.correlation(i, side))[1][:, ::-1] for side in (0, 1)}
            self.second = np.zeros(shape)
            return np.zeros(shape)
        left, right = self.bases[0], self.bases[1]
        series, b2 = self.series(i)[1:], self.betas[1]
        self.second = b2 * self.second + (1 - b2) * (left.T @ series[-1] @ right) ** 2
        inside = left.T @ self.numerator(self.kernel, series) @ right
        inside = inside / (np.sqrt(self.second / (1 - b2 ** len(series))) + self.eps)
        if len(series) % 3 == 0:
            self.bases = {side: np.linalg.qr(self.correlation(i, side) @ self.bases[side])[0] for side in (0, 1)}
        return left @ inside @ right.T
