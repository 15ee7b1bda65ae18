"""Forward and backward see the weights as they stand, also in a synchronous phase, or sharded over replicas."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stretto.nn.batch import call
from stretto.nn.sharded_modules import gathered, groups_of, release
from stretto.weights.weights import Weights


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
