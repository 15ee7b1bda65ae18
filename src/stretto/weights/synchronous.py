"""The weights as they stand, for a while: a synchronous phase of a method that otherwise has others."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from stretto.weights.current import Current
from stretto.weights.weights import Weights


class Plain(Current):
    """Forward and backward as in plain training, while `other`, whose turn will come, goes on to follow the updates."""

    def __init__(self, other: Weights) -> None:
        super().__init__(other.module)
        self.other = other

    def forget(self) -> None:
        """The other one forgets."""
        self.other.forget()

    def update(self, step: Callable[[], object]) -> None:
        """The other one keeps what it will need."""
        self.other.update(step)

    def held(self, versions: Iterable[Any]) -> Iterator[Tensor]:
        """What the other one keeps."""
        return self.other.held(())

    def state_dict(self) -> dict[str, Any]:
        """What the other one knows."""
        return self.other.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the other one go on from there."""
        self.other.load_state_dict(state)
