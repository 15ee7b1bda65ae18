"""How large a learning rate may be under delay."""

import cmath
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from stretto.errors import UsageError
from stretto.options.checks import is_number, is_whole, shown

GRID = 200  # angles for each turn that the sought curve makes
SMALLEST = -8  # decimal exponent of the smallest angle


MOST = 10_000  # updates of delay: a schedule has no more stages


def stable_rate(delay: int, momentum: float = 0.0, feedback: float = 0.0) -> float:
    """The rate, times the curvature, up to which a weight settles whose gradient is `delay` updates old.

    A quadratic of curvature h is trained by averaged gradients, `u <- m u + (1 - m) g`, as Adam does before it scales
    them, with update-level feedback `w <- w - rate (u + c (u - u_prev))`. The weight oscillates with growing amplitude
    as soon as rate x h is larger than the number returned: 2 without delay and momentum, 38 with a momentum of 0.9, 1
    with a delay of one update whatever the momentum. `torch.optim.SGD` adds gradients up: its rate may be (1 - m) times
    as large.

    Args:
        delay: updates between a gradient's forward and its step.
        momentum: m, at least 0 and less than 1.
        feedback: c, 0 for none.

    Raises UsageError for values out of range.
    """
    if not is_whole(delay) or not 0 <= delay <= MOST:
        raise UsageError(f"stable_rate(delay={shown(delay)}): a whole number of updates, 0 to {MOST}")
    if not is_number(momentum) or not 0 <= momentum < 1:
        raise UsageError(f"stable_rate(momentum={shown(momentum)}): a number of at least 0 and less than 1")
    if not is_number(feedback) or not 0 <= feedback < math.inf:
        raise UsageError(f"stable_rate(feedback={shown(feedback)}): a number of 0 or more")
    at = partial(at_circle, delay=delay, momentum=momentum, feedback=feedback)
    tried = [(angle, at(angle)) for angle in angles_of(delay)]
    crossings = [
        crossing(at, left, right) for (left, one), (right, other) in pairwise(tried) if one.imag * other.imag < 0
    ]
    rates = (at(angle).real for angle in (*crossings, math.pi))
    return min(rate for rate in rates if rate > 0)


def at_circle(angle: float, delay: int, momentum: float, feedback: float) -> complex:
    """The rate x curvature at which z = exp(i angle) is a root of the recursion; a rate only where it is real.

    From `z^D (z - 1) (z - m) + k (1 - m) ((1 + c) z - c) = 0`, of a mode that is multiplied by z in every update.
    """
    z = cmath.rect(1.0, angle)
    moved = (1 - momentum) * ((1 + feedback) * z - feedback)
    return -(z - 1) * (z - momentum) * z**delay / moved


def angles_of(delay: int) -> list[float]:
    """Angles from 0 to pi, exclusive, so close that no two crossings lie between neighbours."""
    count = GRID * (delay + 2)
    small = [10 ** (SMALLEST * (1 - n / GRID)) * math.pi / count for n in range(GRID)]
    return small + [math.pi * n / count for n in range(1, count)]


def crossing(at: Callable[[float], complex], left: float, right: float) -> float:
    """The angle between two others at which the imaginary part changes its sign, by bisection."""
    negative = at(left).imag < 0
    for _ in range(60):
        middle = (left + right) / 2
        if (at(middle).imag < 0) == negative:
            left = middle
        else:
            right = middle
    return (left + right) / 2
