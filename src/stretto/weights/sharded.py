"""Weights sharded over the replicas, and gathered while forwards and backwards need them (torch's FSDP2)."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from stretto.nn.sharded_modules import gathered, groups_of, release
from stretto.weights.current import Current


class Sharded(Current):
    """The current weights, gathered from all replicas; a backward reduce-scatters their gradients.

    Only the last of the `per_update` backwards before an update frees the gathered weights and sums gradients over the
    replicas: an update costs one all-gather and one reduce-scatter. With `reshard` every backward does both, for the
    least memory. With `split` a backward comes as I and W, and I leaves no gradients.
    """

    def __init__(self, module: nn.Module, per_update: int, *, split: bool, reshard: bool) -> None:
        super().__init__(module)
        self._groups = groups_of(module)
        self._per_update, self._split, self._reshard = per_update, split, reshard
        self._done = 0  # backwards since the last update
        self._gathering: list[Any] = []  # what the first forward since the last update has asked for
        self._reduces = True  # whether the next backward sums gradients over the replicas
        self._prepare_backward(weights=not split)

    def _prepare_backward(self, *, weights: bool) -> None:
        reduces = weights and (self._reshard or self._done + 1 == self._per_update)
        if reduces != self._reduces:
            self._reduces = reduces
            for group in self._groups:
                group.set_requires_gradient_sync(reduces, recurse=False)
                group.set_reshard_after_backward(reduces or self._reshard, recurse=False)

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """The module's output, and None. The first forward after an update asks for all weights at once."""
        if not (self._reshard or self._gathering):
            self._gathering = [group.unshard(async_op=True) for group in self._groups]  # torch waits where each is used
        return super().forward(inputs, behind)

    def leaves(self, version: Any) -> list[Tensor]:
        """The gathered weights, whose gradients the next backward fills."""
        self._prepare_backward(weights=True)
        return list(gathered(self.module))

    def collect(self, version: Any) -> None:
        """Count the backward, and prepare for the next one."""
        self._done += 1
        self._prepare_backward(weights=not self._split)

    def update(self, step: Callable[[], object]) -> None:
        """Free the gathered weights and call `step`, which changes this replica's shard of them."""
        for weights in self._gathering:
            weights.wait()  # of a layer that no forward used: the next one must not see them
        self._gathering = []
        release(self.module)
        step()
        self._done = 0
        self._prepare_backward(weights=not self._split)
