"""LARS: momentum SGD in which each layer's step is proportional to the norm of its weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stretto.optim.layerwise import (
    check_range,
    check_real,
    explaining_params,
    foreach_groups,
    gradients,
    norms,
    one_where_a_norm_is_zero,
    scaled,
    with_gradients,
)
from stretto.options.checks import flag


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888).

    `r = trust ||w|| / (||g|| + wd ||w|| + eps)`, 1 where ||w|| or ||g|| is 0; `v <- m v + r (g + wd w); w <- w - lr v`
    for each parameter. In the paper the velocity includes lr; here lr multiplies the velocity, as in torch.optim.SGD.
    At a constant rate both are the same; a change of the rate acts at once here. With r = 1 it is torch.optim.SGD.

    Args:
        params: parameters or groups of them.
        lr: learning rate. A step is about lr * trust / (1 - momentum) of a layer's norm.
        momentum: m.
        weight_decay: wd.
        trust: the largest length of a layer's step at lr=1 without momentum, as a share of its norm.
        eps: added to the denominator of r, so that r is finite.
        vectors: whether biases and the weights of norms (tensors of at most one dimension) are scaled by r and decay,
            too. By default, as in papers on large batches, they take SGD's step without decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 1e-8,
        vectors: bool = False,
    ) -> None:
        check_range("lr", lr, 0, float("inf"))
        check_range("momentum", momentum, 0, 1)
        for name, value in (("weight_decay", weight_decay), ("trust", trust), ("eps", eps)):
            check_range(name, value, 0, float("inf"))
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        flag("vectors", vectors)
        with explaining_params(params):
            super().__init__(params, {**{name: float(value) for name, value in defaults.items()}, "vectors": vectors})
        check_real(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if there is one."""
        loss = with_gradients(closure)
        for group in self.param_groups:
            for parameters, adapts in foreach_groups(group):
                updates = gradients(parameters, "LARS")
                if adapts:
                    updates = adapted(parameters, updates, group)
                if group["momentum"]:
                    updates = self._velocities(parameters, updates, group["momentum"])
                torch._foreach_add_(parameters, updates, alpha=-group["lr"])
        return loss

    def _velocities(self, parameters: list[Tensor], updates: list[Tensor], momentum: float) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        velocities = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, updates)
        return velocities


def adapted(parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """The updates `r (g + wd w)`."""
    decay, weight_norms, gradient_norms = group["weight_decay"], norms(parameters), norms(gradients)
    ratios = group["trust"] * weight_norms / (gradient_norms + decay * weight_norms + group["eps"])
    decayed = list(torch._foreach_add(gradients, parameters, alpha=decay)) if decay else gradients
    return scaled(decayed, one_where_a_norm_is_zero(ratios, weight_norms, gradient_norms))
