"""Weights of which each replica keeps a share, whole while passes need them (torch's FSDP2)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stretto.nn.sharded_modules import gathered, groups_of, release
from stretto.weights.current import Current


class Sharded(Current):
    """The weights as they stand, gathered from all replicas; a backward leaves each share's sum of gradients.

    Of the `per_update` backwards before an update only the last one gives the weights up and adds gradients up over the
    replicas, so that an update costs one gathering and one sum; or all do (`reshard`), which keeps least in memory.
    `split` says that the backward comes as I and W: I leaves no gradients.
    """

    def __init__(self, module: nn.Module, per_update: int, *, split: bool, reshard: bool) -> None:
        super().__init__(module)
        self._groups = groups_of(module)
        self._per_update, self._split, self._reshard = per_update, split, reshard
        self._done = 0  # backwards since the last update
        self._ends = True  # whether the next backward ends with shares
        self._expect(weights=not split)

    def _expect(self, *, weights: bool) -> None:
        ends = weights and (self._reshard or self._done + 1 == self._per_update)
        if ends != self._ends:
            self._ends = ends
            for group in self._groups:
                group.set_requires_gradient_sync(ends, recurse=False)
                group.set_reshard_after_backward(ends or self._reshard, recurse=False)

    def leaves(self, version: Any) -> list[Tensor]:
        """The whole weights: the next backward is for them."""
        self._expect(weights=True)
        return list(gathered(self.module))

    def collect(self, version: Any) -> None:
        """One backward less to come."""
        self._done += 1
        self._expect(weights=not self._split)

    def update(self, step: Callable[[], object]) -> None:
        """Each replica steps its share."""
        release(self.module)
        step()
        self._done = 0
        self._expect(weights=not self._split)
