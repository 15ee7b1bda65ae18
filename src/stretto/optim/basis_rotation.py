"""Basis rotation: Adam for matrices, in a basis near the eigenbasis of curvature, where stale gradients do less harm.

With the gradient G [n, m] of a matrix W (Jung et al. 2026, arXiv 2602.03515; SOAP, Vyas et al. 2025, arXiv 2409.11321):

    L <- b2 L + (1 - b2) G G^T    R <- b2 R + (1 - b2) G^T G    M <- b1 M + (1 - b1) G
    every `interval` steps, the first included:  U' = Q of QR((L + d) U)    V' = Q of QR((R + d) V)
        S <- (U'^T U)^2 S (V^T V')^2    U, V <- U', V'
    S <- b2 S + (1 - b2) (U^T G V)^2
    W <- W - lr U (M_hat / (sqrt(S_hat) + eps)) V^T    M_hat = U^T M V / (1 - b1^k)    S_hat = S / (1 - b2^k)

Bias correction and the place of eps are those of torch.optim.Adam, so U = V = 1 is its step; the bases start as 1.
Weight decay is the optimizer's own: in the gradient for Adam, beside the step for AdamW. M is kept unrotated, and turns
with the bases. S turns, too (ours; squares are of elements): these are the second moments in the new basis of what had
uncorrelated coordinates in the former one. Left as it is, it belongs to other directions after a refresh, and a step is
up to 1 / sqrt(1 - b2) times too long, 31 times with torch's betas. d (ours) is a small share of the mean eigenvalue of
L or R: eigenvectors stay the same, but where L knows no gradient yet, U keeps its columns and does not take them from
rounding errors.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.optim.spike import SpikeCompensation, without_gradients
from stretto.optim.spike_coefficients import late_average
from stretto.optim.update_feedback import refuse_low_precision, stepped
from stretto.optimizers import rotated_sides
from stretto.options.checks import MOST_DELAY, flag, number, of_kind, whole

SHIFT = 1e-4  # of the mean eigenvalue


class RotatedAdam:
    """The step of torch.optim.Adam or AdamW, for matrices in their rotated basis, for all else as the optimizer's.

    A matrix is a parameter with two dims; a side longer than `stretto.optimizers.LARGEST_BASIS` is left as it is.
    `two_sided` rotates both sides; else U alone does, the side of its outputs in torch.nn.Linear. `interval` is the
    number of steps between two refreshes of the bases. With a `delay`, the numerator U^T M V / (1 - b1^k) of matrices,
    and that of all else, is the one of spike compensation (`optim/spike_coefficients.py`). All that is kept stands in
    the optimizer's own state: exp_avg is M, exp_avg_sq is S, beside them are L, U, R and V.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, interval: int, *, two_sided: bool = True, delay: float = 0.0
    ) -> None:
        of_kind("RotatedAdam: optimizer", optimizer, torch.optim.Optimizer, "torch.optim.Adam or AdamW")
        whole("RotatedAdam: interval", interval, 1)
        flag("RotatedAdam: two_sided", two_sided)
        number("RotatedAdam: delay", delay, 0, MOST_DELAY)
        refuse_others(optimizer)
        refuse_low_precision(optimizer, "rotate")
        self.optimizer = optimizer
        self.interval = interval
        self.two_sided = two_sided
        self.delay = delay
        self._rest = SpikeCompensation(optimizer, delay)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter with a gradient."""
        gradients = {
            parameter: (group, parameter.grad)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and any(rotated_sides(parameter.shape, two_sided=self.two_sided))
        }
        with without_gradients(gradients):
            self._rest.step()
        for parameter, (group, gradient) in gradients.items():
            self._step_matrix(parameter, gradient, group)

    def _step_matrix(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        rate, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], map(float, group["betas"])
        gradient = -gradient if group["maximize"] else gradient
        if group.get("decoupled_weight_decay"):
            parameter.mul_(1 - rate * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        state = self.optimizer.state[parameter]
        rotations = self._rotations(parameter, state)
        state["step"] += 1
        number = int(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        for side in rotations:
            side.follow(gradient, beta2)
            if (number - 1) % self.interval == 0:
                side.refresh()
        turned = into(gradient, rotations)
        state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        norm = state["exp_avg_sq"].sqrt().div_((1 - beta2**number) ** 0.5).add_(group["eps"])
        inside = late_average(into(state["exp_avg"], rotations), turned, beta1, self.delay, number)
        direction = inside.div_(norm)
        parameter.add_(out_of(direction, rotations), alpha=-rate / (1 - beta1**number))

    def _rotations(self, parameter: Tensor, state: dict[str, Any]) -> "list[Side]":
        # Of the sides that are rotated; makes the state at the first step.
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        sides = []
        for name, length, is_rotated in zip(
            ("left", "right"), parameter.shape, rotated_sides(parameter.shape, two_sided=self.two_sided), strict=True
        ):
            if is_rotated:
                if f"{name}_product" not in state:
                    state[f"{name}_product"] = parameter.new_zeros(length, length)
                    state[f"{name}_basis"] = torch.eye(length, dtype=parameter.dtype, device=parameter.device)
                sides.append(Side(state, name))
        return sides


@dataclass(frozen=True)
class Side:
    """One side of a matrix, "left" or "right", in its state: the average of products of gradients, and its basis."""

    state: dict[str, Any]
    name: str

    @property
    def product(self) -> Tensor:
        """The average L of G G^T, or R of G^T G."""
        found: Tensor = self.state[f"{self.name}_product"]
        return found

    @property
    def basis(self) -> Tensor:
        """Its columns are the rotated directions."""
        found: Tensor = self.state[f"{self.name}_basis"]
        return found

    def follow(self, gradient: Tensor, beta: float) -> None:
        """Average G G^T, or G^T G of the right side."""
        factor = gradient if self.name == "left" else gradient.mT
        self.product.mul_(beta).addmm_(factor, factor.mT, alpha=1 - beta)

    def refresh(self) -> None:
        """One step of the power method on all columns, made orthogonal again; the second moments turn with them."""
        shift = SHIFT * float(self.product.diagonal().mean())
        turned = torch.addmm(self.basis, self.product, self.basis, beta=shift)
        refreshed = torch.linalg.qr(turned).Q
        shares = (refreshed.mT @ self.basis).square()  # of each former direction in each new one
        second = self.state["exp_avg_sq"]
        self.state["exp_avg_sq"] = shares @ second if self.name == "left" else second @ shares.mT
        self.state[f"{self.name}_basis"] = refreshed


def into(matrix: Tensor, sides: list[Side]) -> Tensor:
    """U^T X V, on those sides that are rotated."""
    for side in sides:
        matrix = side.basis.mT @ matrix if side.name == "left" else matrix @ side.basis
    return matrix


def out_of(matrix: Tensor, sides: list[Side]) -> Tensor:
    """U X V^T, on those sides that are rotated."""
    for side in sides:
        matrix = side.basis @ matrix if side.name == "left" else matrix @ side.basis.mT
    return matrix


def refuse_others(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless the optimizer is torch's Adam or AdamW without amsgrad."""
    what = "rotate turns the averages of torch.optim.Adam and AdamW"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UsageError(f"{what}; this optimizer is {type(optimizer).__name__}: use one of them, or leave rotate out")
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise UsageError(f"{what}; maxima of them (amsgrad=True) mean nothing in a basis that turns: use amsgrad=False")
    if any(parameter.is_complex() for parameter in stepped(optimizer)):
        raise UsageError(f"{what}, of real numbers; this one has complex parameters: leave rotate out")
