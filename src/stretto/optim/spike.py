"""Spike compensation: a gradient that arrives D updates late is applied with a larger weight on arrival."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.optim.momentum import check_momentum


def spike_coefficients(momentum: float, delay: float) -> tuple[float, float]:
    """a and b of `w <- w - lr (a v + b g)` (Kosson et al. 2021, arXiv 2003.11666, section 3.2).

    a = m^D and b = (1 - m^D) / (1 - m), with m the `momentum` and D the `delay` in updates. From its arrival on, a
    gradient's total contribution equals that without delay. D = 0 is plain momentum, D = 1 is Nesterov's.
    """
    a = momentum**delay
    return a, (1 - a) / (1 - momentum)


class SpikeCompensation:
    """A step of torch.optim.SGD with momentum, then the difference to the compensated step.

    The optimizer takes its own step, so its scheduler, state and checkpoints stay those of torch.optim.SGD.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, delay: float) -> None:
        check_momentum(optimizer, "spike compensation", "use such an optimizer, or a method without it")
        self.optimizer = optimizer
        self.delay = delay

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter: v <- m v + g; w <- w - lr (a v + b g), with g including weight decay."""
        if self.delay == 0:
            self.optimizer.step()
            return
        pending: list[tuple[Tensor, Tensor, float, float, float]] = []
        for group in self.optimizer.param_groups:
            a, b = spike_coefficients(group["momentum"], self.delay)
            rate = float(group["lr"])
            pending += [(p, total_gradient(p, group), rate, a, b) for p in group["params"] if p.grad is not None]
        self.optimizer.step()
        for parameter, gradient, rate, a, b in pending:
            velocity = self.optimizer.state[parameter]["momentum_buffer"]
            parameter.add_(velocity, alpha=rate * (1 - a)).add_(gradient, alpha=-rate * b)


def total_gradient(parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The gradient that a step of torch.optim.SGD adds to the velocity."""
    assert parameter.grad is not None
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    return gradient.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
