"""PipeMare's T1: smaller steps where gradients are old, until training has settled."""

from collections.abc import Callable

import torch

Step = Callable[[], object]


def divisor(delay: float, finished: int, until: int) -> float:
    """max(D, 1)^p with p = 1 - min(k/K, 1) after k of K updates (Yang et al. 2021, arXiv 1910.05124, section 3.1).

    D is a mean over micro-batches, in updates. Where it is less than 1 the rate is not raised.
    """
    return float(max(delay, 1) ** (1 - min(finished / until, 1)))


class Rescheduled:
    """A step at the optimizer's learning rate divided by what the stage's delay asks for at this time."""

    def __init__(self, optimizer: torch.optim.Optimizer, delay: float, until: int, step: Step) -> None:
        self.optimizer = optimizer
        self.delay = delay
        self.until = until
        self._step = step

    def step(self, finished: int) -> None:
        """Take the step that comes after `finished` updates; leave the learning rate as it was found."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        by = divisor(self.delay, finished, self.until)
        try:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / by
            self._step()
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
