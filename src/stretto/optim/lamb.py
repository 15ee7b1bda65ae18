"""LAMB: AdamW in which each layer's step is proportional to the norm of its weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stretto.optim.layerwise import (
    check_betas,
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


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments for batch training (You et al. 2020, arXiv 1904.00962).

    `u = m_hat / (sqrt(v_hat) + eps) + wd w`; `w <- w - lr r u` with `r = ||w|| / ||u||`, 1 where a norm is 0, for each
    parameter; m_hat and v_hat are Adam's bias-corrected averages. With r = 1 it is torch.optim.AdamW.

    Args:
        params: parameters or groups of them.
        lr: learning rate: the length of a layer's step, as a share of its norm.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator, so that a step is finite where gradients are 0.
        weight_decay: wd.
        vectors: whether biases and the weights of norms (tensors of at most one dimension) are scaled by r and decay,
            too. By default, as in papers on large batches, they take AdamW's step without decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        vectors: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            check_range(name, value, 0, float("inf"))
        check_betas(betas)
        numbers = {"lr": float(lr), "eps": float(eps), "weight_decay": float(weight_decay)}
        defaults = {**numbers, "betas": betas, "vectors": vectors}
        flag("vectors", vectors)
        with explaining_params(params):
            super().__init__(params, defaults)
        check_real(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if there is one."""
        loss = with_gradients(closure)
        for group in self.param_groups:
            for parameters, adapts in foreach_groups(group):
                updates = self._directions(parameters, gradients(parameters, "LAMB"), group)
                if adapts:
                    updates = adapted(parameters, updates, group["weight_decay"])
                torch._foreach_add_(parameters, updates, alpha=-group["lr"])
        return loss

    def _directions(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Adam's `m_hat / (sqrt(v_hat) + eps)`."""
        states = [self._state(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1
        (beta1, beta2), steps = group["betas"], [state["step"] for state in states]
        averages, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(averages, roots)
        torch._foreach_div_(directions, [1 - beta1**step for step in steps])
        return list(directions)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        return state


def adapted(parameters: list[Tensor], directions: list[Tensor], decay: float) -> list[Tensor]:
    """The updates `r u`, with u = directions + decay * parameters; `directions` are changed in place."""
    if decay:
        torch._foreach_add_(directions, parameters, alpha=decay)
    weight_norms, update_norms = norms(parameters), norms(directions)
    ratios = one_where_a_norm_is_zero(weight_norms / update_norms, weight_norms, update_norms)
    return scaled(directions, ratios)
