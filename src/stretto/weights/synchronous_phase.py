"""The current weights in a synchronous phase of a method that otherwise stashes or predicts weights."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from stretto.weights.current import Current
from stretto.weights.weights import Weights


class Plain(Current):
    """Forward and backward as in plain training, while `other`, the weights of other phases, follows the updates."""

    def __init__(self, other: Weights) -> None:
        super().__init__(other.module)
        self.other = other

    def forget(self) -> None:
        """Make `other` drop its versions."""
        self.other.forget()

    def update(self, step: Callable[[], object]) -> None:
        """Let `step` change the parameters through `other`, which keeps what its later phases need."""
        self.other.update(step)

    def held(self, versions: Iterable[Any]) -> Iterator[Tensor]:
        """The tensors that `other` keeps."""
        return self.other.held(())

    def state_dict(self) -> dict[str, Any]:
        """The state of `other`."""
        return self.other.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of `other`."""
        self.other.load_state_dict(state)
