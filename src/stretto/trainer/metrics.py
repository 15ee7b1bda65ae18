"""Measures of an evaluation beside its loss: a function of (output, target), or an object that collects batches."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsFloat

from torch import Tensor

from stretto.errors import UsageError
from stretto.losses import CrossEntropy, Sum, understand
from stretto.options.checks import mapping, shown
from stretto.options.user_errors import error_place

RETURNED = "return one number, a mean over the batch's examples, or (sum, count)"


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
        """Whether the metric is an object that collects batches itself."""
        return all(callable(getattr(self.function, method, None)) for method in ("reset", "update", "compute"))


RESERVED = ("loss", "accuracy")  # keys that an evaluation has anyway


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

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._sum, self._weight = 0.0, 0.0
        if metric.collects:
            self._call(metric.function.reset)

    def add(self, output: Any, target: Any, examples: int) -> None:
        """Add a batch of so many examples."""
        if self._metric.collects:
            self._call(self._metric.function.update, output, target)
            return
        value = self._call(self._metric.function, output, target)
        if isinstance(value, Sum):
            value = (value.total, value.count)
        total, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if weight is None:
            self._sum, self._weight = self._sum + self._number(total, value) * examples, self._weight + examples
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
        try:
            return function(*arguments)
        except UsageError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}{error_place(error)}"
            raise UsageError(f"metric {self._metric.name} raised {text}") from error


def refuse_undefined(values: Mapping[str, float], where: str) -> None:
    """Raise UsageError for a metric that is no finite number, although the loss is one."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise UsageError(
                f"metric {name} is {value} {where}, where the loss is finite: let it return a number for every batch, "
                "or (sum, count), with a count of 0 where it is not defined"
            )
