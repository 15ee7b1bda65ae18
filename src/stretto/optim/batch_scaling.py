"""Scales the learning rate and momentum to another batch size."""

import math
from collections.abc import Callable

from stretto.errors import UsageError, nearest
from stretto.options.checks import is_among, is_number, is_whole, shown

MOST = 10**12  # the largest batch size, in examples
Rule = Callable[[float, float, float], tuple[float, float]]


def momentum_rule(lr: float, momentum: float, share: float) -> tuple[float, float]:
    """`m' = m^k`, `lr' = lr k (1 - m') / (1 - m)`, for k times the batch (Kosson et al. 2021, arXiv 2003.11666).

    The total contribution of an example's gradient, and the number of examples over which it decays, stay the same.
    """
    scaled: float = momentum**share
    return lr * share * (1 - scaled) / (1 - momentum), scaled


def linear_rule(lr: float, momentum: float, share: float) -> tuple[float, float]:
    """`lr' = lr k`: one step replaces k small ones (Goyal et al. 2017, arXiv 1706.02677)."""
    return lr * share, momentum


def sqrt_rule(lr: float, momentum: float, share: float) -> tuple[float, float]:
    """`lr' = lr sqrt(k)`: the variance of a step stays the same (Krizhevsky 2014, arXiv 1404.5997)."""
    return lr * math.sqrt(share), momentum


RULES: dict[str, Rule] = {"momentum": momentum_rule, "linear": linear_rule, "sqrt": sqrt_rule}


def scale_for_batch(
    lr: float, momentum: float, batch_size: int, *, to: int, rule: str = "momentum"
) -> tuple[float, float]:
    """The learning rate and momentum for updates of `to` examples, from those that suit `batch_size` examples.

    `rule="momentum"` scales both, for torch.optim.SGD's momentum, `v <- m v + g; w <- w - lr v`. "linear" and "sqrt"
    scale the rate of any optimizer and keep the momentum. "linear" suits SGD while gradient noise dominates the
    steps, "sqrt" Adam and LAMB. A large rate needs a warm-up (`stretto.optim.warmup`). Raises UsageError for values
    out of range.
    """
    if not (is_number(lr) and 0 < lr < math.inf):
        raise UsageError(f"lr={shown(lr)}: a learning rate is a positive number")
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise UsageError(f"momentum={shown(momentum)}: choose a value from 0 up to, but not including, 1")
    for name, size in (("batch_size", batch_size), ("to", to)):
        if not is_whole(size) or not 1 <= size <= MOST:
            raise UsageError(f"{name}={shown(size)}: a whole number of examples, at least 1 (and at most {MOST:,})")
    if not is_among(rule, RULES):
        raise UsageError(f"unknown rule {shown(rule)}: {nearest(str(rule), RULES)}")
    return RULES[rule](lr, momentum, to / batch_size)
