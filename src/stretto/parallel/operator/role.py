"""How a layer's weights are cut over processes, and which layers can be cut."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

Style: TypeAlias = Literal["column", "row", "groups", "vocabulary", "attention", "channels", "random", "replicate"]


@dataclass(frozen=True)
class Role:
    """A style, and how many each process has of outputs (column, groups), inputs (row), rows, heads or channels.

    With `sliced` a column's output, a row's input, or both of a grouped convolution are this process's channels only.
    Otherwise the layer takes and returns whole tensors. The weight consists of `blocks` equal blocks, each cut alike.
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


def weight_dims(layer: nn.Module) -> WeightDims | None:
    """The dims of a layer's weight; None where it cannot be cut, as any subclass: its forward may differ."""
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
    """The size of a layer's weight along `dim`."""
    size: int = layer.weight.size(dim)  # type: ignore[operator]
    return size


def groups(layer: nn.Module) -> int:
    """The number of a convolution's groups; 1 for any other layer."""
    count = getattr(layer, "groups", 1)
    assert isinstance(count, int)
    return count
