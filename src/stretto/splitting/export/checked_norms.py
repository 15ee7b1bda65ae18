"""Norms of an exported graph that refuse what torch's functions refuse: an operator alone trains on a single value.

Its variance would be 0, and the statistics kept of it not a number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> Tensor:
    """torch.nn.functional.batch_norm as an exported graph calls it."""
    if training:
        refuse_single(x, x.numel() // x.shape[1])
    normed: Tensor = aten.batch_norm.default(x, weight, bias, mean, var, training, momentum, eps, cudnn)
    return normed


def group_norm(x: Tensor, groups: int, weight: Any, bias: Any, eps: float = 1e-5, cudnn: bool = True) -> Tensor:
    """torch.nn.functional.group_norm as an exported graph calls it."""
    refuse_single(x, x.numel() // groups)
    normed: Tensor = aten.group_norm.default(x, groups, weight, bias, eps, cudnn)
    return normed


def refuse_single(x: Tensor, values: int) -> None:
    """Raise ValueError, as torch does, where a channel or a group has so many values: one."""
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")


CHECKED: dict[Any, Callable[..., Tensor]] = {
    aten.batch_norm.default: batch_norm,
    aten.group_norm.default: group_norm,
}
