"""What a layer does with its weights on several processes, and the layers that can be cut."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

Style: TypeAlias = Literal["column", "row", "groups", "vocabulary", "attention", "channels", "random", "replicate"]


@dataclass(frozen=True)
class Role:
    """A style, and how many channels each process has: of outputs (column, groups), inputs (row), heads (attention).

    `sliced`: what a column makes stays with its process; what a row takes is already there; of groups, both. Otherwise
    whole tensors go in and come out.
    """

    style: Style
    sizes: tuple[int, ...] = ()
    sliced: bool = False
    blocks: int = 1


@dataclass(frozen=True)
class WeightDims:
    """Which dims of the weight are outputs and inputs, and which dim of activations (from the end) are channels."""

    outputs: int
    inputs: int
    channels: int


def kind(layer: nn.Module) -> WeightDims | None:
    """What is known of a layer; None where it cannot be cut. A subclass may do anything with its weights."""
    if type(layer) is nn.Linear:
        return WeightDims(0, 1, -1)
    if type(layer) in CONVOLUTIONS:
        return WeightDims(0, 1, -1 - CONVOLUTIONS[type(layer)])
    if is_transposed(layer):
        return WeightDims(1, 0, -1)
    return None


CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is Hugging Face's Conv1D: a linear layer whose weight is [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D" and all(hasattr(layer, name) for name in ("nf", "weight", "bias"))


def width(layer: nn.Module, dim: int) -> int:
    """The size of a layer's weight."""
    size: int = layer.weight.size(dim)  # type: ignore[operator]
    return size


def groups(layer: nn.Module) -> int:
    """How many groups a convolution has; 1 for any other layer."""
    count = getattr(layer, "groups", 1)
    assert isinstance(count, int)
    return count
