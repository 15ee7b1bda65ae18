"""An optimizer like another one, of other parameters."""

import copy
from typing import Any

import torch

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
