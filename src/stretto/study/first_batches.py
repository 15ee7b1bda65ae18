"""What is tried of a run before it starts: the sizes of its first batches, and its first evaluation.

Sizes are compared with those that its stages were traced for; an evaluation is tried on the user's data, or with the
user's metrics.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stretto import data
from stretto.data.dataset import RowReader
from stretto.data.user_data import UserData, form, is_classes
from stretto.errors import UsageError
from stretto.losses import BatchMeans, mean
from stretto.nn.batch import first_size, inputs_of, with_names_of
from stretto.settings.runs import known
from stretto.splitting.export.exported import fixed_sizes, refuse_misfit
from stretto.study.evaluation import EVALUATION_BATCH
from stretto.study.prepare import Prepared, costs_of, metrics_of
from stretto.trainer.evaluate import Metric, MetricTally
from stretto.trainer.fit import derive_seed

TRAINING_BATCHES = 3  # that are looked at before a run, besides the last of validation


def refuse_other_sizes(prepared: Prepared) -> None:
    """Raise UsageError if a first batch of the run has sizes that its stages, traced for an example, do not take.

    Reads the first training batches in the run's order, and the last validation batch. Stages of other kinds take
    batches of any size that the model takes: nothing is read for them.
    """
    first, settings = prepared.stages[0], prepared.settings
    if not fixed_sizes(first):
        return
    for where, inputs in first_inputs(prepared.dataset, known(settings.batch_size), settings.seed):
        try:
            refuse_misfit(first, inputs)
        except UsageError as error:
            raise UsageError(f"data {prepared.dataset.name}: {where}: {error}") from error


@lru_cache(maxsize=4)
def first_inputs(
    loaded: data.Dataset | UserData, batch_size: int, seed: int
) -> tuple[tuple[str, Sequence[Tensor]], ...]:
    """(which batch, its inputs on the meta device), kept so that several methods read them once."""
    return tuple((where, shapes_of(x)) for where, x in read_first(loaded, batch_size, seed))


def read_first(loaded: data.Dataset | UserData, batch_size: int, seed: int) -> Iterator[tuple[str, Any]]:
    """(which batch, its inputs): the first training batches, then the last validation batch."""
    first = loaded.train.first_training_batches(batch_size, derive_seed(seed), TRAINING_BATCHES)
    for index, (x, _) in enumerate(first):
        yield f"batch {index} of train", x
    stop = len(loaded.validation)
    last = (stop - 1) // EVALUATION_BATCH
    yield f"batch {last} of validation", loaded.validation.read(slice(last * EVALUATION_BATCH, stop))[0]


def shapes_of(x: Any) -> tuple[Tensor, ...]:
    """The tensors of a batch's inputs without values."""
    inputs = inputs_of(x)
    return with_names_of(inputs, [torch.empty_like(tensor, device="meta") for tensor in inputs])


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
    means = prepared.trainer.backend.means
    try:
        prepared.trainer.evaluate([batch], trying(metrics, means))
    except UsageError as error:
        costs_of(prepared)  # a step of training: if that fails, too, the mistake is not this split's
        raise UsageError(f"{where}: {error}") from error


def trying(metrics: list[Metric], means: BatchMeans) -> Mapping[str, Callable[[Any, Any], float]]:
    """Functions that call the metrics, check what they return, and have no value of their own."""

    def checked(metric: Metric) -> Callable[[Any, Any], float]:
        def function(output: Any, target: Any) -> float:
            MetricTally(metric, means).add(output, target, first_size(target))
            return 0.0

        return mean(function)

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
