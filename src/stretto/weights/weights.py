"""The interface of every weight policy: which weights a forward sees, and where its gradients go.

The policy without copies: forward and backward see the weights as they stand, also in a synchronous phase, or sharded
over replicas.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.batch import call
from stretto.nn.sharded_modules import gathered, groups_of, release


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


class Current(Weights):
    """No copies and no versions: correct where no update falls between a forward and its backward.

    If an update does fall there, PyTorch refuses the backward ("modified by an inplace operation").
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._leaves: list[Tensor] = list(self._named.values())

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """The module's output, and None: there is one version of the weights only."""
        assert behind == 0, f"weights {behind} updates back are asked for; only the current ones exist"
        return call(self.module, inputs), None

    def leaves(self, version: Any) -> list[Tensor]:
        """The trainable parameters themselves."""
        return self._leaves

    def collect(self, version: Any) -> None:
        """Do nothing: the backward has filled the parameters' own `.grad`."""

    def forget(self) -> None:
        """Do nothing: no values but the parameters are kept."""

    def update(self, step: Callable[[], object]) -> None:
        """Call `step`; no earlier values are kept."""
        step()

    def forward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The trainable parameters, by name."""
        return self._named

    def backward_values(self, version: Any) -> Mapping[str, Tensor]:
        """The trainable parameters, by name."""
        return self.forward_values(version)

    def held(self, versions: Iterable[Any]) -> Iterator[Tensor]:
        """No tensors: only the module holds the weights."""
        return iter(())


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
