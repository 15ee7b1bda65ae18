"""Learning-rate schedules for large batches: a gradual warm-up, as their rate is too large for the first updates."""

import math
from collections.abc import Callable
from typing import Any

import torch

from stretto.errors import UsageError
from stretto.options.checks import is_number, is_whole, of_kind, shown
from stretto.options.user_errors import called

MOST = 10**15  # the largest number of updates
Factor = Callable[[int], float]  # the number of finished updates -> a factor of the rate


def warmup(
    updates: int, *, start: float = 0.0, then: Factor | None = None
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR]:
    """A scheduler for Trainer's `scheduler=`: the rate grows linearly to its full value at update `updates`.

    `start` is the share of the full rate that it grows from: 1/k for a rate scaled to k times the batch (Goyal et al.
    2017, arXiv 1706.02677, section 2.2). `then` maps the number of updates since to a factor of the rate, such as
    `stretto.optim.cosine(900)`. Raises UsageError for values out of range.
    """
    check_updates(updates)
    if not (is_number(start) and 0 <= start <= 1):
        raise UsageError(f"start={shown(start)}: a share of the full rate, from 0 to 1")
    if then is not None:
        factor_of = called("then", then, 0, wanted="a function of the updates since, such as optim.cosine(900)")
        of_kind("then(0)", factor_of, (int, float), "a function that returns a factor of the rate")

    def factor(finished: int) -> float:
        if finished < updates:
            return start + (1 - start) * (finished + 1) / updates
        return 1.0 if then is None else then(finished - updates)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def cosine(updates: int) -> Factor:
    """A factor for `warmup`'s `then=`: from 1 to 0 along half a cosine over `updates` updates, then 0."""
    check_updates(updates)
    return lambda finished: (1 + math.cos(math.pi * min(finished / updates, 1))) / 2 if updates else 0.0


def check_updates(updates: Any) -> None:
    """Raise UsageError unless `updates` is a whole number from 0 to MOST."""
    if not is_whole(updates) or not 0 <= updates <= MOST:
        raise UsageError(f"updates={shown(updates)}: a whole number of updates, 0 or more (and at most {MOST:,})")
