"""Loss, accuracy and metrics of a model over batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from stretto.errors import UsageError
from stretto.losses import BatchMeans, CrossEntropy, Loss, Sum, mean_and_weight, understand
from stretto.nn.batch import counted
from stretto.options.checks import mapping, shown
from stretto.options.user_errors import explained

RETURNED = "return one number, a mean over the batch's examples, or (sum, count)"
RESERVED = ("loss", "accuracy")  # keys that an evaluation has anyway


@dataclass(frozen=True)
class Metric:
    """A named measure and which direction is better.

    `function` takes (output, target) and returns a mean over the batch's examples, or (sum, count), of which the
    evaluation's value is made; or it is an object (a torchmetrics Metric, say) with `reset()`, `update(output, target)`
    and `compute()`, which sees every batch and says the value at the end.
    """

    name: str
    function: Any
    higher: bool = False

    @property
    def collects(self) -> bool:
        return all(callable(getattr(self.function, method, None)) for method in ("reset", "update", "compute"))


def named_metrics(where: str, metrics: Mapping[str, Any] | None) -> list[Metric]:
    """Metrics of functions given by name; a function's `higher_is_better` says the direction.

    Raises UsageError for what cannot be called, and for names that an evaluation has anyway.
    """
    if metrics is None:
        return []
    mapping(where, metrics, "a dict of functions (output, target) -> number by name")
    return [named_metric(name, function) for name, function in metrics.items()]


def named_metric(name: str, function: Any, *, higher: bool = False) -> Metric:
    """A metric of a function, of an object that collects batches, or of a class of such objects."""
    if name in RESERVED:
        raise UsageError(f"metric {name!r}: an evaluation has a {name} of its own; choose another name")
    function = function() if isinstance(function, type) else function
    says_higher = getattr(function, "higher_is_better", None) is True
    if isinstance(understood := understand(function), CrossEntropy):  # weighed as the loss is
        function = partial(understood.value, counted=True)
    metric = Metric(name, function, higher=higher or says_higher)
    if not metric.collects and not callable(function):
        raise UsageError(f"metric {name} is {shown(function)}: give a function (output, target) -> number")
    return metric


class MetricTally:
    """The value of one metric over the batches of an evaluation. Errors name the metric."""

    def __init__(self, metric: Metric, means: BatchMeans) -> None:
        self._metric, self._means = metric, means
        self._sum, self._weight = 0.0, 0.0
        if metric.collects:
            self._call(metric.function.reset)

    def add(self, output: Any, target: Any, examples: int) -> None:
        if self._metric.collects:
            self._call(self._metric.function.update, output, target)
            return
        value = self._call(self._metric.function, output, target)
        if isinstance(value, Sum):
            value = (value.total, value.count)
        total, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if weight is None:
            mean = self._number(total, value)
            self._sum, self._weight = self._sum + mean * examples, self._weight + examples
            self._means.metric(self._metric.name, self._metric.function, mean, output, target, examples)
        else:
            self._sum, self._weight = self._sum + self._number(total, value), self._weight + self._number(weight, value)

    def result(self) -> float:
        """The value over all batches. Raises UsageError if nothing counted."""
        if self._metric.collects:
            value = self._call(self._metric.function.compute)
            return self._number(value, value)
        if not self._weight:
            raise UsageError(f"metric {self._metric.name}: nothing counts; it returned a count of 0 for every batch")
        return self._sum / self._weight

    def _number(self, value: Any, returned: Any) -> float:
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, bool) or not isinstance(value, SupportsFloat) or isinstance(value, Tensor):
            raise UsageError(f"metric {self._metric.name} returned {shown(returned)}: {RETURNED}")
        return float(value)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with explained(f"metric {self._metric.name} raised"):
            return function(*arguments)


def refuse_undefined(values: Mapping[str, float], where: str) -> None:
    """Raise UsageError for a metric that is no finite number, although the loss is one."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise UsageError(
                f"metric {name} is {value} {where}, where the loss is finite: let it return a number for every batch, "
                "or (sum, count), with a count of 0 where it is not defined"
            )


class Tally:
    """Sums over evaluated batches. A batch's mean loss is weighted by its count, or its number of examples.

    `means` looks at whether a mean that is weighted so is one over examples.
    """

    def __init__(self, metrics: Sequence[Metric], means: BatchMeans) -> None:
        self._means = means
        self.loss = self.weight = self.examples = self.hits = self.targets = 0.0
        self.metrics = {metric.name: MetricTally(metric, means) for metric in metrics}
        self._are_classes = True  # whether all targets so far can be hit

    def add(self, output: Any, target: Any, loss: Loss, examples: int) -> None:
        mean, weight = mean_and_weight(loss, output, target, examples)
        self._means.loss(loss, mean, output, target, examples)
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

    def result(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean "loss", the "accuracy" if there are targets to hit, and the metrics, of such `sums`.

        Raises UsageError if nothing counts.
        """
        loss, weight, examples, hits, targets, *values = sums
        if not examples:
            raise UsageError("evaluate got no examples: the iterable of batches is empty (a used-up generator?)")
        if not weight:
            raise UsageError(
                f"evaluate got {examples:.0f} examples of which nothing counts: the loss returned a count of 0 for "
                "all of them (are all targets ignored?)"
            )
        accuracy = {"accuracy": hits / targets} if targets else {}
        return {"loss": loss / weight, **accuracy, **dict(zip(self.metrics, values, strict=True))}


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
