"""Derivatives of a frozen model: dropout and batch statistics are off, and attention can be differentiated twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stretto.errors import UsageError
from stretto.nn.batch import call, inputs_of
from stretto.nn.preserve import evaluating
from stretto.options.checks import of_kind


@contextmanager
def frozen(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the trainable parameters; meanwhile dropout and batch statistics are off. Raises UsageError without any."""
    of_kind("model", model, nn.Module, "an nn.Module, such as trainer.model")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("the model has no trainable parameters: there is no gradient to look at")
    # Only the plain kernel of attention has a second derivative.
    with evaluating([model]), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield parameters


def outputs(model: nn.Module, x: Any) -> Any:
    """The model's output for a batch: a tensor, or a tuple of tensors."""
    return call(model, inputs_of(x))


def flat_gradient(
    value: Tensor, parameters: list[nn.Parameter], *, keep: bool = False, differentiable: bool = False
) -> Tensor:
    """The gradient of the scalar `value` as one vector over all parameters; zeros where it does not depend on them.

    The graph of `value` is freed unless `keep` or `differentiable`; if `differentiable`, the gradient has one, too.
    """
    gradients = torch.autograd.grad(
        value,
        parameters,
        retain_graph=keep or differentiable,
        create_graph=differentiable,
        allow_unused=True,
        materialize_grads=True,
    )
    return torch.cat([gradient.flatten() for gradient in gradients])
