"""Ask a module, by trying it, whether its backward sees weights that changed after its forward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.batch import call, with_names_of
from stretto.weights import unnoticed_changes
from stretto.weights.saved_tensor_check import watched_call
from stretto.weights.tensor_origins import tensors_in


def sees_current_weights(module: nn.Module, inputs: Sequence[Any]) -> list[str]:
    """Why methods that change weights between a forward and its backward cannot train a module; [] if they can.

    Either the message of the UsageError that `checked_call` would raise, or names of weights. Each matrix that the
    backward reads is changed in place and restored: gradients that stay the same come from a copy of the matrix that
    `checked_call` did not see. Parameters, buffers and gradients are left as they were.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            _, names = watched_call(module, inputs)
            matrices = [name for name in names if module.get_parameter(name).ndim > 1]  # a bias is saved, but not read
            return [name for name in matrices if not backward_reads(module, inputs, name)]
    except UsageError as error:
        return [str(error)]
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def backward_reads(module: nn.Module, inputs: Sequence[Any], name: str) -> bool:
    """Whether gradients differ once the weight `name` has been changed in place after the forward."""
    weight = module.get_parameter(name)
    detached = [value.detach().clone() if isinstance(value, Tensor) else value for value in inputs]
    leaves: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    leaves += [value.requires_grad_() for value in detached if isinstance(value, Tensor) and value.is_floating_point()]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in detached]  # it may work in place
    outputs = [tensor for tensor in tensors_in([call(module, with_names_of(inputs, copies))]) if tensor.requires_grad]
    cotangents = [torch.randn_like(tensor) for tensor in outputs]

    def gradients() -> list[Tensor]:
        computed = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True, allow_unused=True)
        return [gradient for gradient in computed if gradient is not None]

    before, values = gradients(), weight.detach().clone()
    with torch.no_grad(), unnoticed_changes.unnoticed([weight]):
        weight.add_(torch.randn_like(weight))
    try:
        after = gradients()
    finally:
        with torch.no_grad(), unnoticed_changes.unnoticed([weight]):
            weight.copy_(values)
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
