"""What LARS and LAMB share: groups of parameters, norms, and the ratios that scale each layer's step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.options.checks import is_number, refuse, shown


def foreach_groups(group: Mapping[str, Any]) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield a group's parameters with gradients in lists of one device and dtype, and whether each list adapts.

    Parameters that adapt have steps scaled by their norm, and weight decay. Biases and the weights of norms, tensors of
    at most one dimension, do not adapt unless `vectors`: their norm is so small that such steps would hardly move them.
    """

    def kind(parameter: Tensor) -> tuple[str, str, bool]:
        return str(parameter.device), str(parameter.dtype), group["vectors"] or parameter.dim() > 1

    ready = [parameter for parameter in group["params"] if parameter.grad is not None]
    for (_, _, adapts), parameters in groupby(sorted(ready, key=kind), kind):
        yield list(parameters), adapts


def gradients(parameters: Sequence[Tensor], name: str) -> list[Tensor]:
    """The parameters' gradients. Raises UsageError for sparse ones, as the norm needs a layer's whole gradient."""
    dense = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.is_sparse for gradient in dense):
        raise UsageError(
            f"{name} takes no sparse gradients: make the embedding with sparse=False, or train it with "
            "torch.optim.SparseAdam"
        )
    return dense


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norms of the tensors [len(tensors)], in float32 or wider: bfloat16 would lose the sum's small squares."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].dtype == wide:
        return torch.stack(torch._foreach_norm(list(tensors)))
    # Not torch._foreach_norm(dtype=...): torch 2.14 does not support it for sharded tensors.
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors])


def scaled(tensors: Sequence[Tensor], ratios: Tensor) -> list[Tensor]:
    """Each tensor times its ratio; `ratios` is [len(tensors)] and stays on the device."""
    return list(torch._foreach_mul(list(tensors), list(ratios.unbind())))


def one_where_a_norm_is_zero(ratios: Tensor, *layer_norms: Tensor) -> Tensor:
    """The ratios [n], but 1 where a norm is 0: the ratio would be 0, and never move the layer, or infinite."""
    positive = torch.stack([norm > 0 for norm in layer_norms]).all(0)
    return torch.where(positive, ratios, torch.ones_like(ratios))


def with_gradients(closure: Callable[[], float] | None) -> float | None:
    """Call the closure with gradients enabled and return its loss, None without a closure: the result of `step`."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@contextmanager
def explaining_params(params: object) -> Iterator[None]:
    """In this block an error of torch.optim.Optimizer about its parameters becomes UsageError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        remedy = "give parameters, such as model.parameters(), or dicts of them, {'params': ..., 'lr': 0.1}"
        raise UsageError(f"params={shown(params)}: {error}; {remedy}") from error


def check_real(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise UsageError for a parameter that is not of floating point: it has no step in proportion to its norm."""
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if not parameter.is_floating_point():
            raise UsageError(f"params: {shown(parameter)}: give parameters of floating point")


def check_range(name: str, value: float, low: float, below: float) -> None:
    """Raise UsageError unless a hyperparameter is a number with low <= value < below."""
    if not (is_number(value) and low <= value < below):
        remedy = f"from {low:g} up to, but not including, {below:g}" if below < float("inf") else f"of {low:g} or more"
        raise UsageError(f"{name}={shown(value)}: choose a value {remedy}")


def check_betas(betas: object) -> None:
    """Raise UsageError unless it is two decay rates, each with 0 <= beta < 1."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        refuse("betas", betas, "two numbers, (0.9, 0.999)")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, 0, 1)
