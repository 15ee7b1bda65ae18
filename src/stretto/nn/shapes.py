"""Shapes from one example: what each stage gives, and the first stage that cannot take what it is given."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.batch import call, inputs_on
from stretto.nn.preserve import evaluating


def trace(stages: Sequence[nn.Module], example: Any, device: torch.device, first: int = 0) -> list[tuple[Tensor, ...]]:
    """Run `example` through the stages without gradients and without moving any statistics; return every output.

    `first` is the index of the first of these stages.

    Raises UsageError at the first stage that does not fit, with the shapes that met there.
    """
    outputs: list[tuple[Tensor, ...]] = []
    tensors = inputs_on(example, device)
    with torch.no_grad(), evaluating(stages):
        for index, stage in enumerate(stages, start=first):
            try:
                output = call(stage, tensors)
            except Exception as error:
                came = f"stage {index - 1}" if index else "the example"
                raise UsageError(
                    f"stage {index} ({summary(stage)}) cannot take what {came} gives, {describe(tensors)}: {error}"
                ) from error
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
                raise UsageError(
                    f"stage {index} ({summary(stage)}) returned {kinds}: give a tensor or a tuple of tensors"
                )
            outputs.append(tensors)
    return outputs


def example_for_linear(stages: Sequence[nn.Module]) -> Tensor | None:
    """An example made from the first Linear's width, if every stage's first and last layer with weights is a Linear."""
    first: nn.Linear | None = None
    for stage in stages:
        layers = [module for module in stage.modules() if any(True for _ in module.parameters(recurse=False))]
        if not layers or not isinstance(layers[0], nn.Linear) or not isinstance(layers[-1], nn.Linear):
            return None
        first = first or layers[0]
    return None if first is None else torch.zeros(2, first.in_features, dtype=first.weight.dtype)


def describe(tensors: Sequence[Tensor]) -> str:
    """Shapes and types of tensors, for messages."""
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def summary(module: nn.Module) -> str:
    """A module in a few words, for messages."""
    names = [type(child).__name__ for child in module.children()]
    if not names:
        return type(module).__name__
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{type(module).__name__} of {shown}"
