"""What LARS and LAMB share: which parameters have a step of their own size, and how large it is."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.options.checks import is_number, shown


def cohorts(group: Mapping[str, Any]) -> Iterator[tuple[list[Tensor], bool]]:
    """The parameters of a group that have a gradient, those of one device and type together; whether they adapt.

    Biases and the weights of norms do not, nor do they decay: they have one dimension or none, and so small a norm that
    a step in proportion to it would hardly move them. `vectors=True` treats them as the others.
    """

    def kind(parameter: Tensor) -> tuple[str, str, bool]:
        return str(parameter.device), str(parameter.dtype), group["vectors"] or parameter.dim() > 1

    ready = [parameter for parameter in group["params"] if parameter.grad is not None]
    for (_, _, adapts), alike in groupby(sorted(ready, key=kind), kind):
        yield list(alike), adapts


def gradients(parameters: Sequence[Tensor], name: str) -> list[Tensor]:
    """Their gradients. Raises UsageError for sparse ones: a layer's norm takes all of it."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.is_sparse for gradient in found):
        raise UsageError(
            f"{name} takes no sparse gradients: make the embedding with sparse=False, or train it with "
            "torch.optim.SparseAdam"
        )
    return found


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each, in float32 at least: half of the squares of a bfloat16 layer would be lost."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].dtype == wide:
        return torch.stack(torch._foreach_norm(list(tensors)))
    # Not torch._foreach_norm(dtype=): torch 2.14 does not take it for sharded tensors.
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors])


def scaled(tensors: Sequence[Tensor], ratios: Tensor) -> list[Tensor]:
    """Each tensor times its ratio, one of [len(tensors)]; nothing waits for the device."""
    return list(torch._foreach_mul(list(tensors), list(ratios.unbind())))


def one_where_a_norm_is_zero(ratios: Tensor, *of: Tensor) -> Tensor:
    """The ratios; 1 for a layer that is all zeros, or has no gradient: the other would never move it."""
    whole = torch.stack([each > 0 for each in of]).all(0)
    return torch.where(whole, ratios, torch.ones_like(ratios))


def with_gradients(closure: Callable[[], float] | None) -> float | None:
    """What `step` returns: the closure's loss, computed with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@contextmanager
def registering(params: object) -> Iterator[None]:
    """What torch.optim.Optimizer says of parameters that it cannot take becomes UsageError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        wanted = "parameters, such as model.parameters(), or dicts of them, {'params': ..., 'lr': 0.1}"
        raise UsageError(f"params={shown(params)}: {error}; give {wanted}") from error


def check_real(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UsageError for a parameter that is not of floating point: it has no step in proportion to its norm."""
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if not parameter.is_floating_point():
            raise UsageError(f"params: {shown(parameter)}: give parameters of floating point")


def check_range(name: str, value: float, low: float, below: float) -> None:
    """Raise UsageError for a hyperparameter that could not train."""
    if not (is_number(value) and low <= value < below):
        remedy = f"from {low:g} up to, but not including, {below:g}" if below < float("inf") else f"of {low:g} or more"
        raise UsageError(f"{name}={shown(value)}: choose a value {remedy}")
