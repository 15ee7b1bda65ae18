"""The interface of every weight policy: which weights a forward sees, and where its gradients go."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError


@contextmanager
def unwritten(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise UsageError if a forward in this block writes to one of these weights, by name.

    Of several versions it would change one, and none of those to come: a plain loop has only one.
    """
    before = [weight._version for weight in weights.values()]
    yield
    for (name, weight), version in zip(weights.items(), before, strict=True):
        if weight._version != version:
            raise UsageError(
                f"the forward changes its parameter {name} in place (as embeddings with max_norm do), of which this "
                "method has several versions: use a synchronous method, or change weights between steps"
            )


class Weights(ABC):
    """The weights of one stage over time. A *version* stands for the weights that one forward saw."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @abstractmethod
    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the weights from `behind` updates ago.

        Returns the module's output and the version of the weights it saw, which lives until `collect`.
        """

    def recompute(self, inputs: Sequence[Tensor], version: Any) -> tuple[Any, Any]:
        """Run the module again for the backward of a forward that saw `version` and whose graph was not kept.

        On the weights of this version where the policy keeps them, else on the current ones.
        """
        return self.forward(inputs)

    @abstractmethod
    def leaves(self, version: Any) -> list[Tensor]:
        """The tensors whose `.grad` a backward through `version` fills."""

    @abstractmethod
    def collect(self, version: Any) -> None:
        """Move the gradients of a finished backward through `version` to the module's parameters."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all versions: no backward of a past forward will come, and the parameters have just been set."""

    @abstractmethod
    def update(self, step: Callable[[], object]) -> None:
        """Let `step` change the module's parameters in place, and keep the values that versions in flight need."""

    @abstractmethod
    def forward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The weights that the forward which returned `version` has read, by the parameter's name; not copies.

        Valid after that forward and before the next update.
        """

    @abstractmethod
    def backward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The weights that a backward through `version` would read now, by the parameter's name; not copies."""

    @abstractmethod
    def held(self, versions: Iterable[Any]) -> Iterator[Tensor]:
        """All tensors with values of weights that these versions, or this object, hold.

        The parameters may be among them, and tensors may share storage.
        """

    def ahead(self) -> float:
        """How many updates ahead of the current weights a forward reads; 0 where nothing is predicted."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of past updates, besides the module and the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most keep nothing of past updates)
        """Load what `state_dict` returned, after the parameters have been loaded and `forget` called."""
