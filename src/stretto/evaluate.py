"""Loss and accuracy of a model over batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.batch import IGNORED, inputs_on, target_on
from stretto.errors import UsageError
from stretto.precision import Precision


@dataclass
class Tally:
    """Sums over the batches that have been evaluated."""

    loss: float = 0.0
    examples: int = 0
    hits: int = 0
    targets: int = 0

    def add(self, output: Any, target: Any, loss: Tensor, examples: int) -> None:
        """One more batch and its mean loss."""
        self.loss += float(loss) * examples
        self.examples += examples
        if countable(output, target):
            self.hits += int((output.argmax(class_dim(output, target)) == target).sum())
            self.targets += int((target != IGNORED).sum())

    def result(self) -> dict[str, float]:
        """The mean loss, and the accuracy if it can be told. Raises UsageError where there are no examples."""
        if not self.examples:
            raise UsageError("evaluate got no examples: the iterable of batches is empty (a used-up generator?)")
        accuracy = {"accuracy": self.hits / self.targets} if self.targets else {}
        return {"loss": self.loss / self.examples, **accuracy}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    device: torch.device,
    precision: Precision,
) -> dict[str, float]:
    """Mean loss over examples; accuracy over targets where targets are whole numbers one dimension short of outputs.

    Targets of -100 ask for nothing and do not count.
    Batches are weighted by their number of examples. Raises UsageError when there are none.
    """
    tally = Tally()
    with evaluating([model]):
        for x, y in batches:
            tensors, target = precision.inputs(inputs_on(x, device)), target_on(y, device)
            with precision.forward(device):
                output = model(*tensors)
                value = precision.loss(loss)(output, target)
            tally.add(output, target, value, tensors[0].shape[0])
    return tally.result()


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every submodule is in the mode it was in, frozen norms included."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    try:
        for root in modules:
            root.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def countable(output: Any, target: Any) -> bool:
    """Whether "the output's largest entry is the target" makes sense."""
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and output.dim() == target.dim() + 1
    )


def class_dim(output: Tensor, target: Tensor) -> int:
    """Classes stand last in [N, T, V] against [N, T], second in [N, K, H, W] against [N, H, W], even if K = H."""
    of_pixels = output.dim() > 3 and output.shape[2:] == target.shape[1:]
    return -1 if output.shape[:-1] == target.shape and not of_pixels else 1
