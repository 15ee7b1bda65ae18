"""torch.optim.Muon, also of matrices of which this process has some rows: they are gathered to be orthogonalised."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.nn.sharded_modules import is_share, local_share, share_like
from stretto.optim.layerwise import with_gradients


class ShardedMuon(torch.optim.Muon):
    """Muon whose parameters may be shares of matrices (DTensors), with the numbers of torch.optim.Muon on the whole.

    A group with `keeps_update` keeps each last orthogonalised update in its state, as "update" in bfloat16; what one
    with a "delay" orthogonalises is that of late gradients (`optim/spike_coefficients.py`).
    Averages stay with the shares; each matrix's update is gathered, one after the other, and orthogonalised on every
    process, which keeps its rows. So a step is a collective of the processes that share the matrices.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if there is one."""
        if all(map(is_plain, self.param_groups)):
            loss: float | None = super().step(closure)  # type: ignore[no-untyped-call]
            return loss
        loss = with_gradients(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
        return loss

    def _step_one(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, average = local_share(parameter.grad), local_share(state["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        late = group.get("delay", 0) + bool(group["nesterov"])
        ahead = gradient.lerp(average, group["momentum"] ** late) if late else average
        whole = whole_like(ahead, parameter)
        step = orthogonalised(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows = local_share(share_like(step, parameter))
        if group.get("keeps_update"):
            state["update"] = rows
        rate = float(group["lr"])
        local_share(parameter).mul_(1 - rate * group["weight_decay"]).add_(
            rows, alpha=-rate * shape_factor(whole.shape, group["adjust_lr_fn"])
        )


def is_plain(group: Mapping[str, Any]) -> bool:
    """Whether torch.optim.Muon itself can step a group: whole matrices in time, of which no update is kept.

    Without Nesterov's momentum torch 2.13 normalises the average of a bfloat16 parameter in place.
    """
    as_torchs = bool(group["nesterov"]) and not group.get("keeps_update") and not group.get("delay")
    return as_torchs and not any(map(is_share, group["params"]))


def whole_like(share: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor of which this process has `share`, as it has that of `parameter`. A collective, if it is one."""
    if not is_share(parameter):
        return share
    from torch.distributed.tensor import DTensor

    placed: Any = parameter
    made = DTensor.from_local(
        share, placed.device_mesh, placed.placements, shape=parameter.shape, stride=parameter.stride()
    )
    whole: Tensor = made.full_tensor()
    return whole


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Nearly U V^T of a matrix U S V^T, in bfloat16, as torch.optim.Muon computes it to the last bit.

    X = matrix / ||matrix||, then `steps` times X <- a X + (b A + c A A) X with A = X X^T (Newton-Schulz, quintic). A
    tall matrix is transposed first.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(torch.bfloat16, copy=True)
    found = found.T if tall else found
    found.div_(found.norm().clamp(min=eps))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def shape_factor(shape: torch.Size, adjust: str | None) -> float:
    """The factor of the rate of an m x n matrix: torch.optim.Muon's `adjust_lr_fn`."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    return float(max(1, rows / columns) ** 0.5)
