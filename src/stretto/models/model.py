"""A network as a flat list of blocks, and the recipe from which it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output, target) -> mean loss."""

Recipe: TypeAlias = list[Callable[[], nn.Module]]
"""One function for each block, in order; each is called under its own seed."""


@dataclass(frozen=True, eq=False)
class Model:
    """Blocks in order, each taking the output of the one before, and the loss for the output of the last.

    A user's own model may be one `module`, which is cut as `stretto.split` cuts it; `layers` then holds it alone.
    """

    name: str
    layers: list[nn.Module]
    loss: Loss
    description: str
    module: nn.Module | None = None
    drawn: bool = True  # whether a seed decides any of its weights
