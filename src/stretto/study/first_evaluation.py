"""The first evaluation of a run on the user's data or with the user's metrics, tried before anything is trained."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from stretto.data.dataset import RowReader
from stretto.data.user_data import UserData, form, is_classes
from stretto.errors import UsageError
from stretto.study.evaluation import EVALUATION_BATCH
from stretto.study.prepare import Prepared, costs_of, metrics_of
from stretto.trainer.evaluate import Metric, MetricTally


def refuse_evaluation(prepared: Prepared) -> None:
    """Raise UsageError if the run cannot be evaluated: on validation, on test, by a metric, or as `measure` asks for.

    Reads one batch of each split, with the initial weights. Says nothing of values, which may be undefined as yet; nor
    of the model of a folder, whose weights are not read for this.
    """
    loaded, metrics = prepared.dataset, metrics_of(prepared.settings)
    refuse_probes(prepared)
    computes = isinstance(prepared.computing, nullcontext)
    if not computes or not (isinstance(loaded, UserData) or metrics):
        return
    splits = {"validation": loaded.validation, "test": loaded.test}
    for which, split in splits.items():
        if split is not None:
            try_evaluation(prepared, f"data {loaded.name}: {which}", split, metrics)


def try_evaluation(prepared: Prepared, where: str, split: RowReader, metrics: list[Metric]) -> None:
    """Evaluate a first batch. Raises UsageError, with `where`, if that fails."""
    batch = split.first(EVALUATION_BATCH)
    try:
        prepared.trainer.evaluate([batch], trying(metrics))
    except UsageError as error:
        costs_of(prepared)  # a step of training: if that fails, too, the mistake is not this split's
        raise UsageError(f"{where}: {error}") from error


def trying(metrics: list[Metric]) -> Mapping[str, Callable[[Any, Any], float]]:
    """Functions that call the metrics, check what they return, and have no value of their own."""

    def checked(metric: Metric) -> Callable[[Any, Any], float]:
        def function(output: Any, target: Any) -> float:
            MetricTally(metric).add(output, target, 1)
            return 0.0

        return function

    return {metric.name: checked(metric) for metric in metrics}


def refuse_probes(prepared: Prepared) -> None:
    """Raise UsageError if linear probes are asked for where the user's targets are no classes."""
    loaded = prepared.dataset
    if "probes" not in (prepared.settings.measure or ()) or not isinstance(loaded, UserData):
        return
    x, y = loaded.train.first(1)
    if not isinstance(x, Tensor) or not is_classes(y):
        raise UsageError(
            f"measure=probes: probes are fitted to one tensor with classes for targets, whole numbers from 0 on; "
            f"{loaded.name} has {form(x)} with targets {form(y)}: leave probes out"
        )
