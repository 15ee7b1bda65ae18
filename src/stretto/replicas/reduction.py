"""One replica's copy of a stage among all its copies."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Then = Callable[[], None]


class ReplicaReducer(ABC):
    """What adds up tensors over replicas. All call it for the same stages, in the same order, with the same shapes."""

    def __init__(self, count: int) -> None:
        self.count = count

    @abstractmethod
    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        """Give each tensor the sum of its values in all replicas, in place, and call `then` when that is done.

        Which may be after the return, but is before this replica's next action.
        """

    @abstractmethod
    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        """As `add_up`, compressed on the way if the user wants it."""

    def begin(self) -> None:  # noqa: B027 (most have nothing)
        """A step begins."""

    def leave(self) -> None:  # noqa: B027 (most have nothing)
        """A pause begins: this replica will make no update before the next `begin`."""

    def finish(self) -> None:  # noqa: B027 (most have nothing)
        """All of them have called all of it: whatever has begun comes to its end now."""

    def forget(self) -> None:  # noqa: B027 (most have nothing)
        """A meeting that has begun will not come to its end."""

    @property
    def remembers(self) -> bool:
        """Whether compression keeps anything from one meeting for the next."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What it keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:  # noqa: B027 (most have nothing)
        """Go on from `state_dict`; from the beginning where there is none."""
