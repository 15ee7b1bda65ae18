"""An optimizer's state as it was saved: torch's `load_state_dict` gives tensors the type of their parameter."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

OWN = ("torch.optim", "stretto.optim")  # modules of optimizers whose states are known


def load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """As `optimizer.load_state_dict`, but numbers keep the type that they had.

    NAdam's product of momenta, say, is float32 beside float64 weights. What has the shape of its parameter becomes as
    wide as it, at least: the network may be of another type than the one that was saved.
    """
    optimizer.load_state_dict(dict(state))
    known = type(optimizer).__module__.startswith(OWN)
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded, saved = optimizer.state.get(parameter, {}), state["state"].get(number, {})
        for name, value in saved.items():
            if isinstance(value, Tensor) and value.dtype != loaded[name].dtype and _keeps(value, parameter, known):
                loaded[name] = value.to(loaded[name].device, copy=True)


def _keeps(value: Tensor, parameter: Tensor, known: bool) -> bool:
    # Known optimizers keep float tensors like the parameter, of its type, and single numbers; of others any may be.
    wider = torch.promote_types(value.dtype, parameter.dtype) == value.dtype or not value.is_floating_point()
    if parameter.dim() and value.shape == parameter.shape:
        return wider and not known
    return value.is_floating_point() or not known
