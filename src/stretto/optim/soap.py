"""SOAP: AdamW in a basis in which the gradients of a matrix are nearly uncorrelated."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.optim.layerwise import OwnOptimizer, check_betas, check_range, gradients
from stretto.optim.spike_coefficients import late_average
from stretto.options.checks import whole

MATRIX = 2  # dims from which on a parameter has a basis
SIDES = ("left", "right")
LOW = (torch.bfloat16, torch.float16)  # too few digits for eigenvectors


class SOAP(OwnOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv 2409.11321, algorithm 3).

    For a matrix with gradient G: `G' = QL^T G QR`; `M <- b1 M + (1 - b1) G`; `V <- b2 V + (1 - b2) G' * G'`;
    `N = QL (QL^T M^ QR / (sqrt(V^) + eps)) QR^T`; `W <- W - lr (N + wd W)`; then `L <- b2 L + (1 - b2) G G^T`,
    `R <- b2 R + (1 - b2) G^T G`, and after every so many steps `Q <- QR(L QL)`, likewise for R. M^ and V^ are corrected
    for their bias as Adam's. As in the authors' code, the first gradient of a matrix moves nothing: QL and QR are the
    eigenvectors of its L and R. Kernels of convolutions are matrices [out, in x height x width]; parameters of one dim
    are AdamW's. Bases I make it torch.optim.AdamW. A group with a "delay" has the numerators of late gradients
    (`optim/spike_coefficients.py`).

    Args:
        params: parameters or groups of them, of float32 or float64.
        lr: learning rate.
        betas: b1 and b2.
        eps: added to the denominator.
        weight_decay: wd, for all parameters.
        every: how many steps from one basis to the next.
        largest: sides with more rows or columns (those of an embedding) keep the basis I.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.003,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
        largest: int = 10_000,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            check_range(name, value, 0, float("inf"))
        check_betas(betas)
        whole("every", every, 1)
        whole("largest", largest, 1)
        numbers = {"lr": float(lr), "eps": float(eps), "weight_decay": float(weight_decay)}
        super().__init__(params, {**numbers, "betas": betas, "every": every, "largest": largest})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.dtype in LOW:
                raise UsageError(
                    f"SOAP: a parameter {list(parameter.shape)} of {parameter.dtype} has too few digits for "
                    "eigenvectors: let it step float32 masters, Trainer(..., precision='bf16')"
                )

    def step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of one group."""
        ready = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter, gradient in zip(ready, gradients(ready, "SOAP"), strict=True):
            self._step(parameter, gradient, group)

    def _step(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)  # seen as a matrix
            if parameter.dim() >= MATRIX:
                begin(state, gradient.flatten(1), group)
                return
        state["step"] += 1
        (beta1, beta2), rate = group["betas"], group["lr"]
        average, square = (as_matrix(state[key]) for key in ("exp_avg", "exp_avg_sq"))
        matrix = as_matrix(gradient)
        average.lerp_(matrix, 1 - beta1)
        rotated = into_basis(matrix, state)
        square.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        norm = square.sqrt().div_((1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
        inside = into_basis(average, state)
        inside = late_average(inside, rotated, beta1, group.get("delay", 0), state["step"])
        direction = from_basis(inside / norm, state)
        if group["weight_decay"]:
            parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(direction.view_as(parameter), alpha=-rate / (1 - beta1 ** state["step"]))
        if parameter.dim() >= MATRIX:
            correlate(state, matrix, 1 - beta2)
            if state["step"] % group["every"] == 0:
                refresh(state)


def as_matrix(tensor: Tensor) -> Tensor:
    """A view of a kernel as a matrix; a vector as it is."""
    return tensor.flatten(1) if tensor.dim() > MATRIX else tensor


def begin(state: dict[str, Any], gradient: Tensor, group: Mapping[str, Any]) -> None:
    """Put the two correlations of the first gradient [m, n] and their eigenvectors, the largest first, into a state."""
    for side, size in zip(SIDES, gradient.shape, strict=True):
        if size <= group["largest"]:
            state[f"{side}_correlation"] = gradient.new_zeros(size, size)
    correlate(state, gradient, 1 - group["betas"][1])
    for side in SIDES:
        if f"{side}_correlation" in state:
            state[f"{side}_basis"] = eigenvectors(state[f"{side}_correlation"]).flip(1).contiguous()


def eigenvectors(matrix: Tensor) -> Tensor:
    """Those of a symmetric matrix, the largest last; in float64 where its own dtype gives no numbers.

    MKL's ssyevd gives NaN for some sound matrices, such as the correlation of an embedding's rows of which most are 0.
    """
    found: Tensor = torch.linalg.eigh(matrix)[1]
    if not found.isfinite().all():
        found = torch.linalg.eigh(matrix.double())[1].to(matrix.dtype)
    return found


def correlate(state: Mapping[str, Any], gradient: Tensor, share: float) -> None:
    """Average the correlations of the gradient's rows and of its columns into a state's."""
    for side, matrix in zip(SIDES, (gradient, gradient.T), strict=True):
        if f"{side}_correlation" in state:
            state[f"{side}_correlation"].lerp_(matrix @ matrix.T, share)


def refresh(state: dict[str, Any]) -> None:
    """Take each basis nearer to the eigenvectors of its correlation: one power iteration."""
    for side in SIDES:
        if f"{side}_basis" in state:
            product = state[f"{side}_correlation"] @ state[f"{side}_basis"]
            state[f"{side}_basis"].copy_(torch.linalg.qr(product)[0])


def into_basis(matrix: Tensor, state: Mapping[str, Any]) -> Tensor:
    """QL^T X QR, without the sides that have no basis."""
    left, right = (state.get(f"{side}_basis") for side in SIDES)
    rows = matrix if left is None else left.T @ matrix
    return rows if right is None else rows @ right


def from_basis(matrix: Tensor, state: Mapping[str, Any]) -> Tensor:
    """QL X QR^T, without the sides that have no basis."""
    left, right = (state.get(f"{side}_basis") for side in SIDES)
    rows = matrix if left is None else left @ matrix
    return rows if right is None else rows @ right.T
