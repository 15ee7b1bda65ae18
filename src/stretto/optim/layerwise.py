"""LARS and LAMB, which scale each layer's step by the norm of its weights, and what optimizers of our own share."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.options.checks import flag, is_number, refuse, shown


def foreach_groups(group: Mapping[str, Any]) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield a group's parameters with gradients in lists of one device and dtype, and whether each list adapts.

    Parameters that adapt have steps scaled by their norm, and weight decay. Biases and the weights of norms, tensors of
    at most one dimension, do not adapt unless `vectors`: their norm is so small that such steps would hardly move them.
    """

    def kind(parameter: Tensor) -> tuple[str, str, bool]:
        return str(parameter.device), str(parameter.dtype), group["vectors"] or parameter.dim() > 1

    ready = [parameter for parameter in group["params"] if parameter.grad is not None]
    for (_, _, adapts), parameters in groupby(sorted(ready, key=kind), kind):
        yield list(parameters), adapts


def gradients(parameters: Sequence[Tensor], name: str) -> list[Tensor]:
    """The parameters' gradients. Raises UsageError for sparse ones, as the norm needs a layer's whole gradient."""
    dense = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.is_sparse for gradient in dense):
        raise UsageError(
            f"{name} takes no sparse gradients: make the embedding with sparse=False, or train it with "
            "torch.optim.SparseAdam"
        )
    return dense


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norms of the tensors [len(tensors)], in float32 or wider: bfloat16 would lose the sum's small squares."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].dtype == wide:
        return torch.stack(torch._foreach_norm(list(tensors)))
    # Not torch._foreach_norm(dtype=...): torch 2.14 does not support it for sharded tensors.
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors])


def scaled(tensors: Sequence[Tensor], ratios: Tensor) -> list[Tensor]:
    """Each tensor times its ratio; `ratios` is [len(tensors)] and stays on the device."""
    return list(torch._foreach_mul(list(tensors), list(ratios.unbind())))


def one_where_a_norm_is_zero(ratios: Tensor, *layer_norms: Tensor) -> Tensor:
    """The ratios [n], but 1 where a norm is 0: the ratio would be 0, and never move the layer, or infinite."""
    positive = torch.stack([norm > 0 for norm in layer_norms]).all(0)
    return torch.where(positive, ratios, torch.ones_like(ratios))


def with_gradients(closure: Callable[[], float] | None) -> float | None:
    """Call the closure with gradients enabled and return its loss, None without a closure: the result of `step`."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@contextmanager
def explaining_params(params: object) -> Iterator[None]:
    """In this block an error of torch.optim.Optimizer about its parameters becomes UsageError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        remedy = "give parameters, such as model.parameters(), or dicts of them, {'params': ..., 'lr': 0.1}"
        raise UsageError(f"params={shown(params)}: {error}; {remedy}") from error


def check_real(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UsageError for a parameter that is not of floating point: it has no step in proportion to its norm."""
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if not parameter.is_floating_point():
            raise UsageError(f"params: {shown(parameter)}: give parameters of floating point")


def check_range(name: str, value: float, low: float, below: float) -> None:
    """Raise UsageError unless a hyperparameter is a number with low <= value < below."""
    if not (is_number(value) and low <= value < below):
        remedy = f"from {low:g} up to, but not including, {below:g}" if below < float("inf") else f"of {low:g} or more"
        raise UsageError(f"{name}={shown(value)}: choose a value {remedy}")


def check_betas(betas: object) -> None:
    """Raise UsageError unless it is two decay rates, each with 0 <= beta < 1."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        refuse("betas", betas, "two numbers, (0.9, 0.999)")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, 0, 1)


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer of Stretto's: its parameters and defaults are checked, and `step_group` updates one group's."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        with explaining_params(params):
            super().__init__(params, defaults)
        check_real(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if there is one."""
        loss = with_gradients(closure)
        for group in self.param_groups:
            self.step_group(group)
        return loss

    @abstractmethod
    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have gradients."""


class LARS(OwnOptimizer):
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
        super().__init__(params, {**{name: float(value) for name, value in defaults.items()}, "vectors": vectors})

    def step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of one group."""
        for parameters, adapts in foreach_groups(group):
            updates = gradients(parameters, "LARS")
            if adapts:
                updates = lars_updates(parameters, updates, group)
            if group["momentum"]:
                updates = self._velocities(parameters, updates, group["momentum"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _velocities(self, parameters: list[Tensor], updates: list[Tensor], momentum: float) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        velocities = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, updates)
        return velocities


def lars_updates(parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """The updates `r (g + wd w)`."""
    decay, weight_norms, gradient_norms = group["weight_decay"], norms(parameters), norms(gradients)
    ratios = group["trust"] * weight_norms / (gradient_norms + decay * weight_norms + group["eps"])
    decayed = list(torch._foreach_add(gradients, parameters, alpha=decay)) if decay else gradients
    return scaled(decayed, one_where_a_norm_is_zero(ratios, weight_norms, gradient_norms))


class LAMB(OwnOptimizer):
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
        super().__init__(params, defaults)

    def step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of one group."""
        for parameters, adapts in foreach_groups(group):
            updates = self._directions(parameters, gradients(parameters, "LAMB"), group)
            if adapts:
                updates = lamb_updates(parameters, updates, group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])

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


def lamb_updates(parameters: list[Tensor], directions: list[Tensor], decay: float) -> list[Tensor]:
    """The updates `r u`, with u = directions + decay * parameters; `directions` are changed in place."""
    if decay:
        torch._foreach_add_(directions, parameters, alpha=decay)
    weight_norms, update_norms = norms(parameters), norms(directions)
    ratios = one_where_a_norm_is_zero(weight_norms / update_norms, weight_norms, update_norms)
    return scaled(directions, ratios)
