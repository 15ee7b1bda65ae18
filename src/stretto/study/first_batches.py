"""The shapes of a run's first batches, compared before it starts with those that its stages were traced for."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stretto import data
from stretto.data.user_data import UserData
from stretto.errors import UsageError
from stretto.nn.batch import inputs_of, with_names_of
from stretto.nn.seeding import derive
from stretto.settings.runs import known
from stretto.splitting.export.exported import fixed_sizes, refuse_misfit
from stretto.study.evaluation import EVALUATION_BATCH
from stretto.study.prepare import Prepared

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
    drawn = derive(seed, "batches")
    for index, (x, _) in enumerate(loaded.train.first_training_batches(batch_size, drawn, TRAINING_BATCHES)):
        yield f"batch {index} of train", x
    stop = len(loaded.validation)
    last = (stop - 1) // EVALUATION_BATCH
    yield f"batch {last} of validation", loaded.validation.read(slice(last * EVALUATION_BATCH, stop))[0]


def shapes_of(x: Any) -> tuple[Tensor, ...]:
    """The tensors of a batch's inputs without values."""
    inputs = inputs_of(x)
    return with_names_of(inputs, [torch.empty_like(tensor, device="meta") for tensor in inputs])
