"""Copies optimizers, and loads their state without the casts of `load_state_dict` to the parameter's dtype."""

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

KNOWN = ("torch.optim", "stretto.optim")  # modules of optimizers whose states are known


def load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load as `optimizer.load_state_dict` does, but keep the saved dtype of scalars.

    NAdam's product of momenta, for example, is float32 beside float64 weights. A tensor of its parameter's shape gets
    the parameter's dtype, as the network may have another dtype than the saved one; for an optimizer from elsewhere it
    keeps its own if that is wider.
    """
    optimizer.load_state_dict(dict(state))
    known = type(optimizer).__module__.startswith(KNOWN)
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded, saved = optimizer.state.get(parameter, {}), state["state"].get(number, {})
        for name, value in saved.items():
            if isinstance(value, Tensor) and value.dtype != loaded[name].dtype and _keeps(value, parameter, known):
                loaded[name] = value.to(loaded[name].device, copy=True)


def _keeps(value: Tensor, parameter: Tensor, known: bool) -> bool:
    # Whether a state tensor keeps its saved dtype. Known optimizers hold scalars, and larger tensors of the parameter's
    # dtype; other optimizers may hold anything.
    wider = torch.promote_types(value.dtype, parameter.dtype) == value.dtype or not value.is_floating_point()
    if parameter.dim() and value.shape == parameter.shape:
        return wider and not known
    return not known or (value.is_floating_point() and value.numel() == 1)


PATCHED = ("step", "_opt_called", "zero_grad")  # what schedulers and Lightning change of an optimizer


def copied(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: dict[Any, Any]
) -> torch.optim.Optimizer:
    """An optimizer like the given one with other groups and state, made without its constructor."""
    made = type(optimizer).__new__(type(optimizer))
    attributes = {key: value for key, value in vars(optimizer).items() if key not in PATCHED}
    attributes |= {key: copy.copy(value) for key, value in attributes.items() if isinstance(value, dict)}
    vars(made).update(attributes | {"param_groups": groups, "state": state})
    return made
