"""A model held still: parts that draw or adapt are in evaluation mode, and everything can be differentiated twice."""

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
def still(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Its trainable parameters, while dropout and batch statistics are off. Raises UsageError where there are none."""
    of_kind("model", model, nn.Module, "an nn.Module, such as trainer.model")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("the model has no trainable parameters: there is no gradient to look at")
    # Of attention's kernels only the plain one has a second derivative.
    with evaluating([model]), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield parameters


def outputs(model: nn.Module, x: Any) -> Any:
    """What the model makes of a batch, one tensor or several."""
    return call(model, inputs_of(x))


def flat_gradient(
    value: Tensor, parameters: list[nn.Parameter], *, keep: bool = False, differentiable: bool = False
) -> Tensor:
    """The derivative of `value`, all parameters behind each other; zeros where it does not depend on one.

    The graph of `value` is freed, unless it is to be kept or the derivative is to have one, too.
    """
    found = torch.autograd.grad(
        value,
        parameters,
        retain_graph=keep or differentiable,
        create_graph=differentiable,
        allow_unused=True,
        materialize_grads=True,
    )
    return torch.cat([each.flatten() for each in found])
