"""The momenta of an optimizer's groups, and whether it is the SGD whose velocity the corrections for delay use."""

import torch

from stretto.errors import UsageError


def check_momentum(optimizer: torch.optim.Optimizer, what: str, remedy: str) -> None:
    """Raise UsageError unless the optimizer's velocity is `v <- m v + g` and its step `w <- w - lr v`."""
    needs = f"{what} wants torch.optim.SGD with 0 < momentum < 1, without Nesterov and without dampening"
    if not isinstance(optimizer, torch.optim.SGD):
        raise UsageError(f"{needs}; this optimizer is {type(optimizer).__name__}: {remedy}")
    for group in optimizer.param_groups:
        if not 0 < group["momentum"] < 1 or group["nesterov"] or group["dampening"] != 0:
            values = ", ".join(f"{key}={group[key]}" for key in ("momentum", "nesterov", "dampening"))
            raise UsageError(f"{needs}; this one has {values}: {remedy}")


def momenta_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Each group's momentum: that of SGD and Muon, the first beta of Adam and its kin, 0 where there is neither."""
    groups = optimizer.param_groups
    return [float(group["betas"][0] if group.get("betas") else group.get("momentum", 0.0)) for group in groups]
