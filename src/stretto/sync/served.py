"""What a stage of one replica does with its servers: at each update it pushes gradients and takes the newest weights.

Servers do what the optimizer does otherwise, so this happens in U, and no action of its own is needed for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stretto.sync.agreement import Agreement
from stretto.sync.peers import Then
from stretto.sync.shards import Cut, Piece, take

Changes = Sequence[Piece]  # of each parameter, a shard's answer


class Link(ABC):
    """One replica's way to the servers of a stage, of which each has a shard. Answers are there on return."""

    @abstractmethod
    def push(self, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        """Update with each shard's pieces; returns the staleness of the update, and what has changed in each shard."""

    @abstractmethod
    def settle(self) -> Sequence[Changes]:
        """Training pauses, in all replicas: what has changed in each shard since, or nothing if nobody has pushed."""

    @property
    def is_next(self) -> bool:
        """Whether a push would be the next update, where somebody has to keep to an order that nobody waits for."""
        return True

    @abstractmethod
    def state_dict(self) -> list[Any]:
        """What each shard steps with; None for those that another process keeps on its own."""

    @abstractmethod
    def load_state_dict(self, states: Sequence[Any], weights: Sequence[Sequence[Piece]]) -> None:
        """Go on from there."""


class Served(Agreement):
    """A copy of a stage that others' servers train; `parameters` are what its optimizer would step."""

    def __init__(self, link: Link, cut: Cut, parameters: Sequence[Tensor]) -> None:
        self._link, self._cut, self._parameters = link, cut, parameters

    remembers = True
    steps = True

    @property
    def is_next(self) -> bool:
        """Whether it may update now."""
        return self._link.is_next

    def step(self) -> None:
        """In place of an optimizer's step. Raises UsageError for gradients that cannot be cut."""
        self.staleness, changes = self._link.push(self._pieces([parameter.grad for parameter in self._parameters]))
        self._take(changes)

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """It has: in its step."""

    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Take what others have pushed since."""
        self._take(self._link.settle())
        then()

    def forget(self) -> None:
        """Nothing is under way."""

    def _pieces(self, tensors: Sequence[Tensor | None]) -> list[list[Piece]]:
        return [self._cut.pieces(tensors, shard) for shard in range(self._cut.shards)]

    def _take(self, changes: Sequence[Changes]) -> None:
        for shard, own in enumerate(changes):
            take(self._parameters, self._cut.rows(shard), own)

    def state_dict(self) -> dict[str, Any]:
        """The optimizers of all shards."""
        return {"shards": self._link.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, and with the weights that this copy has. Raises ValueError for another number of shards."""
        states = state.get("shards", [])
        if len(states) != self._cut.shards:
            raise ValueError(
                f"its optimizer is in {len(states)} shards, one for each replica of the run that saved it, and "
                f"{self._cut.shards} are wanted: go on with Mesh(data={len(states)})"
            )
        self._link.load_state_dict(states, self._pieces([parameter.detach() for parameter in self._parameters]))
