"""Sums of tensors over the replicas of a stage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Then = Callable[[], None]


class ShareExchange(ABC):
    """Messages of replicas that step shares of a stage's weights. All call it in the same order, with like shapes."""

    def __init__(self, count: int, me: int) -> None:
        self.count, self.me = count, me

    @abstractmethod
    def scatter(self, shares: Sequence[Sequence[Tensor]], totals: Sequence[Tensor]) -> None:
        """Send each replica its share of this one's gradients; write what all send to this one, added up in order."""

    @abstractmethod
    def gather(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Send this replica's share to all others, and overwrite theirs with what they send."""

    @abstractmethod
    def states(self, state: Mapping[int, Any]) -> list[dict[int, Any]]:
        """What each replica gives, on the CPU: dicts, lists, numbers and tensors."""


class ReplicaReducer(ABC):
    """Sums tensors over replicas. All replicas call it for the same stages, in the same order, with the same shapes."""

    def __init__(self, count: int) -> None:
        self.count = count

    @abstractmethod
    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        """Replace each tensor by its sum over all replicas, in place, and then call `then`.

        The sum may be complete only after the return, but is so before this replica's next action.
        """

    @abstractmethod
    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        """As `add_up`, with the compression that the user has chosen (`AllReduce.hook`)."""

    @property
    def exchange(self) -> ShareExchange | None:
        """What exchanges shares of weights; None where replicas are emulated, and keep whole optimizers."""
        return None

    def begin(self) -> None:  # noqa: B027 (most have nothing to do)
        """A step begins."""

    def leave(self) -> None:  # noqa: B027 (most have nothing to do)
        """A pause begins: this replica makes no update before the next `begin`."""

    def finish(self) -> None:  # noqa: B027 (most have nothing to do)
        """Complete all sums that have begun; all replicas have called for them."""

    def forget(self) -> None:  # noqa: B027 (most have nothing to do)
        """Abandon sums that have begun."""

    @property
    def remembers(self) -> bool:
        """Whether compression keeps a state from one sum to the next."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:  # noqa: B027 (most have no state)
        """Load what `state_dict` returned; None starts the compression anew."""
