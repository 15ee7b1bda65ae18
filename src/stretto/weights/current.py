"""Forward and backward see the weights as they stand."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stretto.nn.batch import call
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
