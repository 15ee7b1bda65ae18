"""The momenta of an optimizer's groups, and whether it is the SGD whose velocity the corrections for delay use."""

from typing import Any

import torch

from stretto.errors import UsageError


def check_momentum(optimizer: torch.optim.Optimizer, what: str, remedy: str) -> None:
    """Raise UsageError unless the optimizer's velocity is `v <- m v + g` and its step `w <- w - lr v`."""
    needs = f"{what} wants torch.optim.SGD with 0 < momentum < 1, without Nesterov and without dampening"
    if not isinstance(optimizer, torch.optim.SGD):
        raise UsageError(f"{needs}; this optimizer is {type(optimizer).__name__}: {remedy}")
    for group in optimizer.param_groups:
        if not has_plain_momentum(group):
            values = ", ".join(f"{key}={group[key]}" for key in ("momentum", "nesterov", "dampening"))
            raise UsageError(f"{needs}; this one has {values}: {remedy}")


def has_velocity(optimizer: torch.optim.SGD) -> bool:
    """Whether `check_momentum` would take this SGD."""
    return all(map(has_plain_momentum, optimizer.param_groups))


def has_plain_momentum(group: dict[str, Any]) -> bool:
    """Whether a group of SGD has momentum, without Nesterov's and without dampening."""
    return 0 < group["momentum"] < 1 and not group["nesterov"] and group["dampening"] == 0


def momenta_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Each group's momentum: that of SGD and Muon, the first beta of Adam and its kin, 0 where there is neither."""
    groups = optimizer.param_groups
    return [float(group["betas"][0] if group.get("betas") else group.get("momentum", 0.0)) for group in groups]
