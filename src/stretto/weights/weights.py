"""What every choice of weights answers: which weights a forward sees, and where its gradients go."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


class Weights(ABC):
    """The weights of one stage over time. A *version* stands for the weights that one forward saw."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @abstractmethod
    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the weights from `behind` updates ago.

        Returns its output and the version it saw, which lives until `collect`.
        """

    def recompute(self, inputs: Sequence[Tensor], version: Any) -> tuple[Any, Any]:
        """Run the module again, for the backward, once a forward whose graph was not kept has seen `version`.

        On the weights of that version where the policy keeps them, else on those that a forward would now see.
        """
        return self.forward(inputs)

    @abstractmethod
    def leaves(self, version: Any) -> list[Tensor]:
        """The tensors whose `.grad` a backward through that version fills."""

    @abstractmethod
    def collect(self, version: Any) -> None:
        """A version's backward is finished: its gradients go to the module's parameters."""

    @abstractmethod
    def forget(self) -> None:
        """Whatever is in flight will not come back; the parameters have just been set."""

    @abstractmethod
    def update(self, step: Callable[[], object]) -> None:
        """Let `step` change the module's parameters in place, and keep what versions in flight need."""

    @abstractmethod
    def forward_values(self, version: Any) -> Mapping[str, Tensor]:
        """What a forward that gave this version has just seen, by the parameter's name; not copies.

        Asked for after the forward and before the next update.
        """

    @abstractmethod
    def backward_values(self, version: Any) -> Mapping[str, Tensor]:
        """What a backward through this version reads if it runs now, by the parameter's name; not copies."""

    @abstractmethod
    def held(self, versions: Iterable[Any]) -> Iterator[Tensor]:
        """Every tensor with values of weights that these versions, or this object, keep; the parameters may be among
        them, and tensors may share storage.
        """

    def ahead(self) -> float:
        """How many updates ahead of the current weights those are that a forward sees; 0 where nothing is predicted."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """What is known of past updates and a checkpoint must hold; the module and the optimizer are not part of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most know nothing of the past)
        """Go on from `state_dict`, after the parameters have been loaded and `forget` called."""
