"""A network as a flat list of blocks, and what the files of this folder hand over to have one built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) -> mean loss."""

Recipe: TypeAlias = list[Callable[[], nn.Module]]
"""One function for each block, in order. Each is called on its own, under a seed of its own."""


@dataclass(frozen=True, eq=False)
class Model:
    """Blocks in order, the input of one the output of the one before, and the loss that fits the last one's output."""

    name: str
    layers: list[nn.Module]
    loss: Loss
    description: str
