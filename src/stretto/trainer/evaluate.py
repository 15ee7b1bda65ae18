"""Loss and accuracy of a model over batches."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.losses import Loss, mean_and_weight
from stretto.nn.batch import IGNORED, call, inputs_on, target_on
from stretto.nn.preserve import evaluating
from stretto.stage.specification import Specification


@dataclass
class Tally:
    """Sums over the batches that have been evaluated. A batch's loss weighs as much as it counts."""

    loss: float = 0.0
    weight: float = 0.0
    examples: int = 0
    hits: int = 0
    targets: int = 0

    def add(self, output: Any, target: Any, loss: Loss, examples: int) -> None:
        """One more batch."""
        mean, weight = mean_and_weight(loss, output, target, examples)
        self.loss += float(mean) * weight
        self.weight += weight
        self.examples += examples
        if countable(output, target):
            self.hits += int((output.argmax(class_dim(output, target)) == target).sum())
            self.targets += int((target != IGNORED).sum())

    def result(self) -> dict[str, float]:
        """The mean loss, and the accuracy if it can be told. Raises UsageError where there are no examples."""
        if not self.examples:
            raise UsageError("evaluate got no examples: the iterable of batches is empty (a used-up generator?)")
        if not self.weight:
            raise UsageError(
                f"evaluate got {self.examples} examples of which nothing counts: the loss returned a count of 0 for "
                "all of them (are all targets ignored?)"
            )
        accuracy = {"accuracy": self.hits / self.targets} if self.targets else {}
        return {"loss": self.loss / self.weight, **accuracy}


@torch.no_grad()
def evaluate(model: nn.Module, of: Specification, batches: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Mean loss over examples, or over what the loss counts; and the accuracy.

    That is over targets, where these are whole numbers one dimension short of outputs.
    Targets of -100 ask for nothing and do not count. Batches are weighted by their number of examples, or, where the
    loss gives (sum, count), by that count. Raises UsageError when there are none, or nothing counts.
    """
    device, precision, tally = of.device, of.precision, Tally()
    with evaluating([model]):
        for x, y in batches:
            tensors, target = precision.inputs(inputs_on(x, device)), target_on(y, device)
            with precision.forward(device):
                output = call(model, tensors)
                tally.add(output, target, precision.loss(of.loss), tensors[0].shape[0])
    return tally.result()


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
