"""PipeMare's T1: learning rates divided by a function of the delay, which fades out over the first K updates."""

from collections.abc import Callable

import torch

from stretto.options.checks import MOST_DELAY, function, number, of_kind, whole

Step = Callable[[], object]


def divisor(delay: float, finished: int, until: int) -> float:
    """max(D, 1)^p with p = 1 - min(k/K, 1) after k of K updates (Yang et al. 2021, arXiv 1910.05124, section 3.1).

    D is the mean delay over micro-batches, in updates; k is `finished`, K is `until`. For D < 1 the divisor is 1.
    """
    return float(max(delay, 1) ** (1 - min(finished / until, 1)))


class Rescheduled:
    """An optimizer's step at its learning rate divided by `divisor`, for a stage with this `delay` in updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, delay: float, until: int, step: Step) -> None:
        of_kind("Rescheduled: optimizer", optimizer, torch.optim.Optimizer, "an optimizer of torch.optim")
        number("Rescheduled: delay", delay, 0, MOST_DELAY)
        whole("Rescheduled: until", until, 1)
        function("Rescheduled: step", step, "a function without arguments, such as optimizer.step", 0)
        self.optimizer = optimizer
        self.delay = delay
        self.until = until
        self._step = step

    def step(self, finished: int) -> None:
        """Take the step after `finished` updates; afterwards the groups have their own learning rates again."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        factor = divisor(self.delay, finished, self.until)
        try:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / factor
            self._step()
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
