"""The processes that share one worker's stages, along the axes tensor, height and width of a mesh.

Each runs the same actions on the same micro-batches: to the schedule a stage that several share is one stage. What they
make of it is the business of `stretto.parallel`.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from stretto.nn.sharded_modules import whole
from stretto.optim import Masters
from stretto.stage.stage import Norms, own_norms


class StageSharing:
    """One process: it has its stages for itself."""

    parts, part = 1, 0  # how many parts a stage's weights have, and which of them is here
    writes = True  # whether no process before this one has the same part

    def prepare(
        self, module: nn.Module, *, first: bool = False, last: bool = False, tied: Collection[Tensor] = ()
    ) -> None:
        """Let a stage do its part. The `first` one gets whole inputs, the `last` one gives whole outputs.

        `tied` are parameters that several stages use.
        """

    def prepare_head(self, head: nn.Module) -> None:
        """Let a head work on what its stage gives, here."""

    def whole(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What all processes together give where each has given such outputs."""
        return outputs

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """The state_dict that a module has on one device."""
        state: dict[str, Tensor] = whole(module.state_dict())
        return state

    def norms(self, modules: Sequence[nn.Module], masters: Masters) -> Norms:
        """How the norms of these modules' gradients are taken."""
        return own_norms

    def check(self, optimizer: torch.optim.Optimizer, stage: int) -> None:
        """Raise UsageError for an optimizer that has to see more of a stage's weights than is here."""

    def working(self) -> AbstractContextManager[None]:
        """While something of a stage runs."""
        return nullcontext()
