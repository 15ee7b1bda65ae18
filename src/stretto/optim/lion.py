"""Lion: steps of one length, in the direction of the sign of an average."""

from collections.abc import Iterable
from typing import Any

import torch

from stretto.optim.layerwise import OwnOptimizer, check_betas, check_range, gradients


class Lion(OwnOptimizer):
    """Evolved sign momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

    `c = b1 m + (1 - b1) g; w <- w - lr (sign(c) + wd w); m <- b2 m + (1 - b2) g`. Every number of a parameter moves by
    lr, but for weight decay; so lr is 3 to 10 times smaller than AdamW's, and wd that much larger. In a group with a
    "delay" D, b1 b2^D takes the place of b1 in c, for late gradients (`optim/spike_coefficients.py`).

    Args:
        params: parameters or groups of them.
        lr: learning rate: how far each number moves in a step.
        betas: b1, of the average whose sign is taken, and b2, of the average that is kept.
        weight_decay: wd.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_range(name, value, 0, float("inf"))
        check_betas(betas)
        super().__init__(params, {"lr": float(lr), "betas": betas, "weight_decay": float(weight_decay)})

    def step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of one group."""
        (beta1, beta2), rate = group["betas"], group["lr"]
        ready = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter, gradient in zip(ready, gradients(ready, "Lion"), strict=True):
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            kept = beta1 * beta2 ** group.get("delay", 0)
            sign = torch.lerp(state["exp_avg"], gradient, 1 - kept).sign_()
            if group["weight_decay"]:
                parameter.mul_(1 - rate * group["weight_decay"])
            parameter.add_(sign, alpha=-rate)
            state["exp_avg"].lerp_(gradient, 1 - beta2)
