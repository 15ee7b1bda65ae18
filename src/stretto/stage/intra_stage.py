"""The processes that share one worker's stages, along the axes tensor, height and width of a mesh.

Each runs the same actions on the same micro-batches: for the schedule they are one worker. `stretto.parallel` divides
the work of a stage among them.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from stretto.nn.sharded_modules import whole_state
from stretto.optim import Masters
from stretto.stage.stage import Norms, own_norms


class StageSharing:
    """How processes share one worker's stages. This base class is for one process, which shares nothing."""

    parts, part = 1, 0  # how many parts a stage's weights have, and which of them is here
    writes = True  # whether no process before this one has the same part

    def prepare(
        self, module: nn.Module, *, first: bool = False, last: bool = False, tied: Collection[Tensor] = ()
    ) -> None:
        """Make a stage compute this process's part. The `first` gets whole inputs, the `last` gives whole outputs.

        `tied` are parameters that several stages use.
        """

    def prepare_head(self, head: nn.Module) -> None:
        """Make a head work on this process's part of its stage's output."""

    def whole(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The whole outputs, put together from every process's part."""
        return outputs

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's state_dict with whole weights, as on one device."""
        state: dict[str, Tensor] = whole_state(module.state_dict())
        return state

    def norms(self, modules: Sequence[nn.Module], masters: Masters, here: Norms = own_norms) -> Norms:
        """The function that takes the norms of these modules' gradients; `here` takes those of what is here."""
        return here

    def check(self, optimizer: torch.optim.Optimizer, stage: int) -> None:
        """Raise UsageError for an optimizer that needs whole weights where this process has a part of them."""

    def working(self) -> AbstractContextManager[None]:
        """The context in which a stage's modules run."""
        return nullcontext()
