"""Predicts weights by an optimizer's next step, computed from its state alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.optim.momentum import check_momentum


def check_direction(optimizer: torch.optim.Optimizer, what: str, remedy: str) -> None:
    """Raise UsageError unless the optimizer is Adam, AdamW, or SGD whose step is `w <- w - lr v`."""
    if not isinstance(optimizer, torch.optim.Adam):
        check_momentum(optimizer, f"{what} takes torch.optim.Adam and AdamW; else it", remedy)


def extrapolated(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], distance: float) -> Tensor:
    """The weight moved by `distance`, a sum of learning rates, along the step that the optimizer's averages predict.

    Before the optimizer's first step it is the parameter itself. SGD: `w - distance v`. Adam:
    `w - distance m_hat / (sqrt(v_hat) + eps)`, minus weight decay if it is decoupled (AdamW). Coupled weight decay and
    the sign of `maximize` are in the averages already.
    """
    if "exp_avg" not in state:
        velocity = state.get("momentum_buffer")
        return parameter if velocity is None else torch.add(parameter, velocity, alpha=-distance)
    steps, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    norm = square.sqrt().div_((1 - beta2**steps) ** 0.5).add_(group["eps"])
    kept = 1 - distance * group["weight_decay"] if group.get("decoupled_weight_decay") else 1.0
    start = parameter if kept == 1 else parameter * kept
    return torch.addcdiv(start, state["exp_avg"], norm, value=-distance / (1 - beta1**steps))
