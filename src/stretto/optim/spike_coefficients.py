"""How much of a late gradient, and of the average of all before, makes up for the delay: spike compensation's numbers.

Without delay a gradient counts c_0, c_1, ... in the numerators of the steps from its own on. D updates late it counts
c_0 + ... + c_D on arrival, for the steps that it missed, and c_(D+1), c_(D+2), ... from then on, as it would have. So
the numerator of update t, which without delay would have been that of step t + D, is `a m + b g`:

    SGD     v: a = m^D, b = (1 - m^D) / (1 - m), of sums c_k = m^k (Kosson et al. 2021, arXiv 2003.11666)
    Adam    m / (1 - b1^t): a = b1^D / (1 - b1^(t+D)), b = sum_(k<D) (1 - b1) b1^k / (1 - b1^(t+k))
    NAdam   with P_t = mu_1 ... mu_t: a = b1^D mu_(t+D+1) / (1 - P_(t+D+1)),
            b = (1 - mu_t) / (1 - P_t) + sum_(k<D) (1 - b1) b1^k mu_(t+k+1) / (1 - P_(t+k+1))
    Muon    m, which is orthogonalised: a = m^D, b = 1 - m^D; with Nesterov's momentum D + 1 takes the place of D
    SOAP    m / (1 - b1^t), in its basis: as Adam
    Lion    b1 m_(t-1) + (1 - b1) g: a = b1 b2^D, b = 1 - b1 b2^D, of m_(t-1)

At D = 0 all of them are the optimizer's own. The corrections of the bias are those of the steps in which the gradient
would have counted; as t grows they are gone, and Adam's a and b are those of SGD's velocity 1 / (1 - b1) times as long.
Where all mu are b1, as with a large momentum_decay, NAdam D late is Adam D + 1 late: NAdam is Adam's spike of one step,
as Nesterov's momentum is SGD's. Denominators and decoupled decay stay as they are. Muon's and Lion's steps have a
length of their own: without delay, the same matrix would be orthogonalised, and the same sum's sign taken. Of a
fraction of an update, (1 - b1) b1^k counts as much less, and P is that of the next whole one.
"""

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor


def spike_coefficients(momentum: float, delay: float) -> tuple[float, float]:
    """a and b of `w <- w - lr (a v + b g)` (Kosson et al. 2021, arXiv 2003.11666, section 3.2).

    a = m^D and b = (1 - m^D) / (1 - m), with m the `momentum` and D the `delay` in updates. From its arrival on, a
    gradient's total contribution equals that without delay. D = 0 is plain momentum, D = 1 is Nesterov's.
    """
    a = momentum**delay
    return a, (1 - a) / (1 - momentum)


def corrected_coefficients(beta: float, delay: float, step: float) -> tuple[float, float]:
    """a and b of Adam's and SOAP's step number `step`, from 1 on, with their corrections of the bias."""
    missed = (share / (1 - beta ** (step + k)) for k, share in enumerate(shares(beta, delay)))
    return beta**delay / (1 - beta ** (step + delay)), sum(missed)


def nesterov_coefficients(
    beta: float, momentum_decay: float, product: float, delay: float, step: float
) -> tuple[float, float]:
    """a and b of NAdam's step number `step`, with P of that step as `product`."""

    def mu(number: float) -> float:
        return float(beta * (1 - 0.5 * 0.96 ** (number * momentum_decay)))

    b = (1 - mu(step)) / (1 - product)
    for k, share in enumerate(shares(beta, delay), start=1):
        product *= mu(step + k)
        b += share * mu(step + k) / (1 - product)
    last = mu(step + ceil(delay) + 1)
    return beta**delay * last / (1 - product * last), b


def shares(beta: float, delay: float) -> Iterator[float]:
    """(1 - beta) beta^k of the steps that a gradient missed, k < delay."""
    for k in range(ceil(delay)):
        yield beta**k - beta ** min(k + 1, delay)


def late_average(average: Tensor, gradient: Tensor, beta: float, delay: float, step: float) -> Tensor:
    """What takes the average's place in a step that divides it by 1 - beta^step: itself without delay, else new."""
    if not delay:
        return average
    a, b = corrected_coefficients(beta, delay, step)
    bias = float(1 - beta**step)
    return torch.mul(average, a * bias).add_(gradient, alpha=b * bias)
