"""What a loss gives: a mean over examples, or a sum and the count that the whole minibatch's sum is divided by.

Micro-batches and replicas each see a part of a minibatch. A mean over examples adds up from theirs, each weighted by
its share of the examples; a mean over tokens that count, or one with class weights, does not: the parts have unequally
many. So a loss may return `(sum, count)`, and training divides by the count of the whole minibatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stretto.errors import UsageError
from stretto.losses.cross_entropy import CrossEntropy, recognise
from stretto.losses.sums import Sum, as_count

Loss = Callable[[Any, Any], Any]  # (output, target) -> mean over the examples, or (sum, count)


@dataclass(frozen=True, eq=False)
class MeanOverExamples:
    """A loss of which the user knows that it is a mean over examples."""

    loss: Loss

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss's own value."""
        return self.loss(output, target)


def mean(loss: Loss) -> MeanOverExamples:
    """Say that `loss` is a mean over the examples of a batch, whatever the targets: Trainer does not check it then.

    For a loss whose value on a batch is the mean of its values on each example. A mean over tokens is one only if all
    examples have equally many that count.
    """
    if not callable(loss):
        raise UsageError(f"stretto.mean({loss!r}): give a function (output, target) -> mean loss over the examples")
    return MeanOverExamples(loss)


def understand(loss: Loss) -> Loss:
    """The loss, as a `CrossEntropy` where it is torch's own."""
    return recognise(loss) or loss


def call(loss: Loss, output: Any, target: Any, *, counted: bool = True) -> Tensor | Sum:
    """What the loss gives; a `CrossEntropy`'s sum and count where these are asked for (`counted`), else its mean.

    Raises UsageError for anything but a number with a gradient, or that and a count.
    """
    if isinstance(loss, CrossEntropy):
        return loss.value(output, target, counted=counted)
    value = loss(output, target)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor) and value[0].numel() == 1:
        count = as_count(value[1], value[0])
        if count is not None:
            return Sum(value[0].reshape(()), count)
    raise UsageError(
        f"the loss returned {described(value)}: it returns a tensor with one number, the mean over the batch's "
        "examples, or (sum, count), a sum over the batch and what the whole minibatch's sum is divided by, at least 0"
    )


def described(value: Any) -> str:
    """A loss's value for a message."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(described, value)) + ")"
    return repr(value)[:80]


def mean_and_weight(loss: Loss, output: Any, target: Any, examples: int) -> tuple[Tensor, float]:
    """The mean over a batch, and how much the batch weighs beside others: its count, or its number of examples."""
    value = call(understand(loss), output, target)
    return (value.mean, float(value.count)) if isinstance(value, Sum) else (value, float(examples))
