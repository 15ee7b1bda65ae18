"""Predicts weights by an optimizer's next step, computed from its state alone.

A prediction moves a weight by a distance s, the sum of the coming learning rates, along the step d that the optimizer's
averages predict: `w - s (d + wd w)`, without the last term where weight decay is coupled. Before the first step it is
the weight itself.

    SGD     v, the velocity (PipeOptim, XPipe)
    Adam    m^ / (sqrt(v^) + eps)
    NAdam   c m / (sqrt(v^) + eps), c = (1 - mu_t) / ((1 - P_t) (1 - b1^t)) + mu_{t+1} / (1 - P_t mu_{t+1}): its step
            with the mean gradient m / (1 - b1^t) as the next one; P_t = mu_1 ... mu_t. c tends to 1, which is Adam
    Muon    f O, the last orthogonalised update O with the factor f of the matrix's shape
    SOAP    QL (QL^T m^ QR / (sqrt(v^) + eps)) QR^T in the basis as it stands; with bases I it is Adam
    Lion    sign(m): its step with m as the next gradient
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.optim.muon_with_adamw import CombinedOptimizer, shape_factor
from stretto.optim.soap import as_matrix, from_basis, into_basis
from stretto.optim.traits import check_known, function_of, row_of

State = Mapping[str, Any]
Group = Mapping[str, Any]


def check_direction(optimizer: torch.optim.Optimizer, what: str, remedy: str) -> None:
    """Raise UsageError unless the optimizer's next step is known: see above. SGD's must be `w <- w - lr v`."""
    if isinstance(optimizer, torch.optim.Muon):
        raise UsageError(
            f"{what} is along the last orthogonalised update, which torch.optim.Muon does not keep: use "
            "stretto.optim.muon, which does then, or predict='weight'"
        )
    check_known(optimizer, "ahead", what, remedy)


def keep_updates(optimizer: torch.optim.Optimizer) -> None:
    """Let Muon's groups keep the last orthogonalised updates, two bytes a number, from their next step on."""
    if isinstance(optimizer, CombinedOptimizer):
        for group in optimizer.param_groups:
            if group["rule"] == "Muon":
                group["keeps_update"] = True


def extrapolated(optimizer: torch.optim.Optimizer, parameter: Tensor, group: Group, distance: float) -> Tensor:
    """The weight moved by `distance`, a sum of learning rates, along the step that the optimizer's averages predict."""
    state: State = optimizer.state.get(parameter, {})
    row = row_of(optimizer, group)
    assert row is not None, f"the step of {type(optimizer).__name__} is not known"
    moved: Tensor = function_of(row.ahead)(parameter, state, group, distance) if state else parameter
    return moved


def along_velocity(parameter: Tensor, state: State, group: Group, distance: float) -> Tensor:
    """`w - distance v`."""
    velocity = state.get("momentum_buffer")
    return parameter if velocity is None else torch.add(parameter, velocity, alpha=-distance)


def along_adam(parameter: Tensor, state: State, group: Group, distance: float) -> Tensor:
    """`w - distance (m^ / (sqrt(v^) + eps) + wd w)`."""
    return along_average(parameter, state, group, distance, distance / (1 - group["betas"][0] ** float(state["step"])))


def along_nadam(parameter: Tensor, state: State, group: Group, distance: float) -> Tensor:
    """`w - distance (c m / (sqrt(v^) + eps) + wd w)`."""
    return along_average(parameter, state, group, distance, distance * nadam_factor(state, group))


def along_average(parameter: Tensor, state: State, group: Group, distance: float, average: float) -> Tensor:
    """`w - average m / (sqrt(v^) + eps)`, and decoupled weight decay; a coupled one is in the averages."""
    norm = root(second_moment(state, group), state, group)
    kept = 1 - distance * group["weight_decay"] if group.get("decoupled_weight_decay") else 1.0
    start = parameter if kept == 1 else parameter * kept
    return torch.addcdiv(start, state["exp_avg"], norm, value=-average)


def second_moment(state: State, group: Group) -> Tensor:
    """The average of squares in the denominator of Adam and its kin."""
    square: Tensor = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    return square


def nadam_factor(state: State, group: Group) -> float:
    """How many times the average m NAdam's next step is, over its norm."""
    beta, decay, steps = float(group["betas"][0]), float(group["momentum_decay"]), float(state["step"])
    now, after = (beta * (1 - 0.5 * 0.96 ** (step * decay)) for step in (steps, steps + 1))
    product = float(state["mu_product"])
    return float((1 - now) / ((1 - product) * (1 - beta**steps)) + after / (1 - product * after))


def along_sign(parameter: Tensor, state: State, group: Group, distance: float) -> Tensor:
    """`w - distance (sign(m) + wd w)`."""
    return moved(parameter, state["exp_avg"].sign(), group, distance)


def along_update(parameter: Tensor, state: State, group: Group, distance: float) -> Tensor:
    """`w - distance (f O + wd w)`."""
    if "update" not in state:
        return parameter
    factor = shape_factor(parameter.shape, group["adjust_lr_fn"])
    return moved(parameter, state["update"].to(parameter.dtype) * factor, group, distance)


def along_soap(parameter: Tensor, state: State, group: Group, distance: float) -> Tensor:
    """As Adam in the basis, turned back."""
    if state["step"] == 0:
        return parameter
    norm = root(as_matrix(state["exp_avg_sq"]), state, group)
    step = from_basis(into_basis(as_matrix(state["exp_avg"]), state) / norm, state).view_as(parameter)
    return moved(parameter, step / (1 - group["betas"][0] ** state["step"]), group, distance)


def root(square: Tensor, state: State, group: Group) -> Tensor:
    """`sqrt(v / (1 - b2^t)) + eps`."""
    steps, beta = float(state["step"]), float(group["betas"][1])
    return square.sqrt().div_((1 - beta**steps) ** 0.5).add_(group["eps"])


def moved(parameter: Tensor, step: Tensor, group: Group, distance: float) -> Tensor:
    """`w - distance (step + wd w)`."""
    return torch.add(parameter * (1 - distance * group["weight_decay"]), step, alpha=-distance)
