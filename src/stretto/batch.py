"""A batch as users write it, and as stages take it."""

from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError

IGNORED = -100
"""A target that asks for nothing, as torch.nn.functional.cross_entropy has it: padding, pixels of no class."""


def inputs_on(x: Any, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of x on the device; x is one tensor, or a tuple or list of them (a DataLoader makes lists)."""
    return tuple(tensor.to(device) for tensor in (x if isinstance(x, tuple | list) else (x,)))


def target_on(y: Any, device: torch.device) -> Any:
    """The target on the device; what is no tensor is the loss's own business, but for tuples and lists of tensors."""
    if isinstance(y, Tensor):
        return y.to(device)
    if isinstance(y, tuple | list):
        return tuple(target_on(part, device) for part in y)
    return y


def cut(value: Any, pieces: int, what: str = "micro-batches") -> list[Any]:
    """Cut a tensor, or a tuple of tensors, along its first dimension as torch.tensor_split cuts."""
    if pieces == 1:
        return [value]
    if isinstance(value, Tensor):
        return list(value.tensor_split(pieces))
    if isinstance(value, tuple) and value:
        return list(zip(*(cut(part, pieces, what) for part in value), strict=True))
    raise UsageError(
        f"a target of type {type(value).__name__} cannot be cut into {pieces} {what}: give a tensor, or a tuple "
        "of tensors, whose first dimension is the examples'"
    )


def as_tuple(value: Any) -> Any:
    """Lists as tuples, so that they can be cut: a DataLoader makes lists."""
    return tuple(as_tuple(part) for part in value) if isinstance(value, tuple | list) else value


def several(value: Any) -> tuple[Any, ...]:
    """One value as a tuple; a tuple of several as it is."""
    return value if isinstance(value, tuple) else (value,)


def first_size(value: Any) -> int:
    """The first dimension of a batch's first tensor; 0 where there is none."""
    if isinstance(value, Tensor):
        return int(value.shape[0])
    return first_size(value[0]) if isinstance(value, tuple | list) and value else 0


def entries(value: Any, examples: int) -> int:
    """How many entries a batch's first tensor has, which is about what a loss counts; `examples` without a tensor."""
    if isinstance(value, Tensor):
        return value.numel()
    return entries(value[0], examples) if isinstance(value, tuple | list) and value else examples
