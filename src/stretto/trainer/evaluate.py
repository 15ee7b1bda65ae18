"""Loss and accuracy of a model over batches, and its outputs."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from stretto.errors import UsageError
from stretto.losses import CrossEntropy, Loss, mean_and_weight
from stretto.nn.batch import call, counted, examples_of, inputs_on, target_on, to_device
from stretto.nn.preserve import evaluating
from stretto.stage.trainer_specification import Specification
from stretto.trainer.metrics import Metric, MetricTally


class Tally:
    """Sums over evaluated batches. A batch's mean loss is weighted by its count, or its number of examples."""

    def __init__(self, metrics: Sequence[Metric] = ()) -> None:
        self.loss = self.weight = self.examples = self.hits = self.targets = 0.0
        self.metrics = {metric.name: MetricTally(metric) for metric in metrics}
        self._are_classes = True  # whether all targets so far can be hit

    def add(self, output: Any, target: Any, loss: Loss, examples: int) -> None:
        """Add a batch of so many examples."""
        mean, weight = mean_and_weight(loss, output, target, examples)
        self.loss += float(mean) * weight
        self.weight += weight
        self.examples += examples
        for metric in self.metrics.values():
            metric.add(output, target, examples)
        threshold = binary_threshold(output, target, mean)
        if threshold is not None:
            self.hits += int(((output.reshape(target.shape) > threshold) == (target > 0)).sum())
            self.targets += target.numel()
        elif countable(output, target):
            output, target = loss.aligned(output, target) if isinstance(loss, CrossEntropy) else (output, target)
            dim = class_dim(output, target)
            counts = counted(target)
            if isinstance(loss, CrossEntropy):
                counts = counts & (target != loss.ignore_index)
            self._are_classes &= bool((target[counts] < output.shape[dim]).all())
            self.hits += int(((output.argmax(dim) == target) & counts).sum())
            self.targets += int(counts.sum())
        else:
            self._are_classes = False

    def sums(self) -> list[float]:
        """The sums, then the values of the metrics: what another process needs for the `result`."""
        values = [metric.result() for metric in self.metrics.values()] if self.examples else [0.0] * len(self.metrics)
        targets = self.targets if self._are_classes else 0.0
        return [self.loss, self.weight, self.examples, self.hits, targets, *values]

    def result(self, sums: Sequence[float] | None = None) -> dict[str, float]:
        """The mean "loss", the "accuracy" if there are targets to hit, and the metrics; of `sums`, or its own.

        Raises UsageError if nothing counts.
        """
        loss, weight, examples, hits, targets, *values = self.sums() if sums is None else sums
        if not examples:
            raise UsageError("evaluate got no examples: the iterable of batches is empty (a used-up generator?)")
        if not weight:
            raise UsageError(
                f"evaluate got {examples:.0f} examples of which nothing counts: the loss returned a count of 0 for "
                "all of them (are all targets ignored?)"
            )
        accuracy = {"accuracy": hits / targets} if targets else {}
        return {"loss": loss / weight, **accuracy, **dict(zip(self.metrics, values, strict=True))}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    specification: Specification,
    batches: Iterable[tuple[Any, Any]],
    metrics: Sequence[Metric] = (),
) -> dict[str, float]:
    """The mean "loss" over examples, or over what the loss counts, the "accuracy" over targets, and the metrics.

    There is an accuracy where targets are classes: whole numbers below the number of columns, which is at least 2, with
    one dimension less than outputs. Those below 0 (padding), and what torch's cross entropy ignores, do not count.
    Where the loss compares outputs with next tokens, so does the accuracy. For one column it is that of targets 0 and
    1, if the loss is their binary cross entropy. Batches are weighted by their number of examples, or, where the loss
    gives (sum, count), by that count. Raises UsageError when there are no examples, or nothing counts.
    """
    device, precision, tally = specification.device, specification.precision, Tally(metrics)
    with evaluating([model]):
        for x, y in batches:
            tensors, target = precision.inputs(inputs_on(x, device)), target_on(y, device)
            with precision.forward(device):
                output = call(model, tensors)
                tally.add(precision.outputs(output), target, specification.loss, examples_of(tensors, target))
    return tally.result()


@torch.no_grad()
def predict(model: nn.Module, specification: Specification, batches: Iterable[Any]) -> list[Any]:
    """The model's output for each batch of inputs, on the CPU, as the loss would get it."""
    device, precision = specification.device, specification.precision
    outputs: list[Any] = []
    with evaluating([model]):
        for x in batches:
            tensors = precision.inputs(inputs_on(x, device))
            with precision.forward(device):
                output = call(model, tensors)
            outputs.append(to_device(precision.outputs(output), torch.device("cpu")))
    return outputs


def countable(output: Any, target: Any) -> bool:
    """Whether targets may be classes: whole numbers with one dimension less than the output, which has two columns."""
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and output.dim() == target.dim() + 1
        and output.shape[class_dim(output, target)] > 1
    )


def binary_threshold(output: Any, target: Any, mean: Tensor) -> float | None:
    """The output above which it stands for 1, where targets are 0 and 1 and it is one column of logits, or of chances.

    Which of them it is shows in the loss: its `mean` is their binary cross entropy. None where it is neither.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or not output.is_floating_point():
        return None
    one_column = output.dim() and output.numel() == target.numel() and output.shape[0] == output.numel()
    if not one_column or not bool(((target == 0) | (target == 1)).all()):
        return None
    given, wanted = output.flatten(), target.flatten().to(output.dtype)
    losses = {0.0: binary_cross_entropy_with_logits(given, wanted)}
    if bool(((given >= 0) & (given <= 1)).all()):
        losses[0.5] = binary_cross_entropy(given, wanted)
    close = torch.finfo(output.dtype).eps ** 0.5
    return next((least for least, loss in losses.items() if abs(float(loss - mean)) <= close * float(loss)), None)


def class_dim(output: Tensor, target: Tensor) -> int:
    """The dim of classes: the last of [N, T, V] for [N, T], the second of [N, K, H, W] for [N, H, W], even if K = H."""
    of_pixels = output.dim() > 3 and output.shape[2:] == target.shape[1:]
    return -1 if output.shape[:-1] == target.shape and not of_pixels else 1
