"""Runs one example batch through the stages: the output shapes, and the first stage that does not fit its input."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stretto.errors import UsageError
from stretto.nn.batch import Named, arguments_of, call, check_names, inputs_on
from stretto.nn.input_errors import advice_on
from stretto.nn.preserve import evaluating
from stretto.options.user_errors import error_place


def trace(
    stages: Sequence[nn.Module], example: Any, device: torch.device, first: int = 0, *, any_output: bool = False
) -> list[tuple[Tensor, ...]]:
    """The outputs of every stage for the batch `example`, without gradients, in evaluation mode.

    `first` is the index of the first of these stages. With `any_output` the last one may return anything: its output
    here are the tensors in it. Raises UsageError at the first stage that cannot take its input, with the input's
    shapes, or with the stage's arguments where the input names others.
    """
    outputs: list[tuple[Tensor, ...]] = []
    tensors = inputs_on(example, device)
    with torch.no_grad(), evaluating(stages):
        for index, stage in enumerate(stages, start=first):
            try:
                output = call(stage, tensors)
            except Exception as error:
                if isinstance(tensors, Named):
                    check_names(tensors, *arguments_of(stage))
                source = f"stage {index - 1}" if index else "the example"
                range_hint = advice_on(error)
                raise UsageError(
                    f"stage {index} ({summary(stage)}) cannot take what {source} gives, {describe(tensors)}: {error}"
                    f"{error_place(error)}{f'. {range_hint}'.rstrip(' .')}"
                ) from error
            tensors = output if isinstance(output, tuple) else (output,)
            if any_output and index == first + len(stages) - 1:
                tensors = tuple([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
                last = index == first + len(stages) - 1
                heads = "; auxiliary heads are built like the model's output: give a tensor, or head=file.py:function"
                raise UsageError(
                    f"stage {index} ({summary(stage)}) returned {kinds}"
                    f"{heads if last else ': give a tensor or a tuple of tensors'}"
                )
            outputs.append(tensors)
    return outputs


def example_for_linear(stages: Sequence[nn.Module]) -> Tensor | None:
    """Zeros [2, width of the first Linear] if every stage's first and last weighted layer is a Linear; or None."""
    first: nn.Linear | None = None
    for stage in stages:
        layers = [module for module in stage.modules() if any(True for _ in module.parameters(recurse=False))]
        if not layers or not isinstance(layers[0], nn.Linear) or not isinstance(layers[-1], nn.Linear):
            return None
        first = first or layers[0]
    return None if first is None else torch.zeros(2, first.in_features, dtype=first.weight.dtype)


def describe(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def summary(module: nn.Module) -> str:
    """A module's class and the classes of its first four children, for messages."""
    names = [type(child).__name__ for child in module.children()]
    if not names:
        return type(module).__name__
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{type(module).__name__} of {shown}"
