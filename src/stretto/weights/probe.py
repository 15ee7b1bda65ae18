"""Ask a module, by trying it, whether its backward sees weights that changed after its forward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.batch import call, like
from stretto.weights import guard
from stretto.weights.check import watched
from stretto.weights.origins import tensors_in


def sees_current_weights(module: nn.Module, inputs: Sequence[Any]) -> list[str]:
    """What is wrong with a module for methods that change weights between a forward and its backward; [] if nothing.

    Runs forwards, and changes each matrix that the backward reads, in place, for a moment: a backward that does not
    change with it reads a copy that `run` did not see. Parameters, buffers and gradients are left as they were.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            _, names = watched(module, inputs)
            matrices = [name for name in names if module.get_parameter(name).ndim > 1]  # a bias is saved, but not read
            return [name for name in matrices if not changes_with(module, inputs, name)]
    except UsageError as error:
        return [str(error)]
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def changes_with(module: nn.Module, inputs: Sequence[Any], name: str) -> bool:
    """Whether a backward differs once the weight has been changed in place after the forward."""
    weight = module.get_parameter(name)
    given = [value.detach().clone() if isinstance(value, Tensor) else value for value in inputs]
    wanted: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    wanted += [value.requires_grad_() for value in given if isinstance(value, Tensor) and value.is_floating_point()]
    copies = [value.clone() if isinstance(value, Tensor) else value for value in given]  # it may work in place
    outputs = [tensor for tensor in tensors_in([call(module, like(inputs, copies))]) if tensor.requires_grad]
    cotangents = [torch.randn_like(tensor) for tensor in outputs]

    def gradients() -> list[Tensor]:
        found = torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    before, kept = gradients(), weight.detach().clone()
    with torch.no_grad(), guard.unnoticed([weight]):
        weight.add_(torch.randn_like(weight))
    try:
        after = gradients()
    finally:
        with torch.no_grad(), guard.unnoticed([weight]):
            weight.copy_(kept)
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
