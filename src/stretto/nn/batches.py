"""Batches that a user gives, (x, y) for evaluation or analysis and x for predictions, checked as they are read."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from multiprocessing import current_process
from typing import Any

import numpy as np
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.batch import check_examples, inputs_of, target_of
from stretto.nn.input_errors import explaining_misfits
from stretto.options.checks import refuse, shown

BATCHES = "an iterable of batches (x, y), such as a DataLoader or a list"


def refuse_workers(loader: Any, where: str) -> None:
    """Raise UsageError for a DataLoader whose workers this process may not start: Python's daemons have no children."""
    workers = getattr(loader, "num_workers", 0)
    if workers and current_process().daemon:
        raise UsageError(
            f"{where} is {shown(loader)} with num_workers={workers}, but this process is a daemon, as those are that "
            "Stretto starts, and may start no others: give num_workers=0, or start the processes with torchrun"
        )


class Batches:
    """Iterates over `batches` once and remembers the current one, for messages; `who` is the function the user called.

    Raises UsageError for anything that is not a pair (x, y) with the same number of examples.
    """

    def __init__(self, who: str, batches: Iterable[tuple[Any, Any]]) -> None:
        if isinstance(batches, str | bytes | Mapping | type) or not hasattr(batches, "__iter__"):
            refuse(f"{who}: batches", batches, BATCHES)
        refuse_workers(batches, f"{who}: batches")
        self._who = who
        self._batches = batches
        self._current = "its first batch"

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for index, batch in enumerate(self._batches):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise UsageError(f"{self._who}: batch {index} is {shown(batch)}: give {BATCHES}")
            x, y = batch
            self._current = f"batch {index}, x {shown(x)} and y {shown(y)}"
            if x is not None:  # None in a process that does not read x
                x = inputs_of(x, f"{self._who}: x of batch {index}")
            y = target_of(y, f"{self._who}: y of batch {index}")
            check_examples(x, y, cuts=False)
            yield x, y

    def explaining_misfits(self) -> AbstractContextManager[None]:
        """In this block an error of the model or the loss becomes UsageError that names the current batch."""
        return explaining_misfits(
            lambda: f"{self._who}: the model or the loss cannot take {self._current}", "Give batches as in training"
        )


class InputBatches:
    """As `Batches`, of inputs alone: iterates over the tensors of each x."""

    def __init__(self, who: str, batches: Iterable[Any]) -> None:
        no_list = isinstance(batches, str | bytes | Mapping | type | Tensor | np.ndarray)
        if no_list or not hasattr(batches, "__iter__"):
            refuse(f"{who}: batches", batches, "an iterable of batches of inputs, such as [x]")
        refuse_workers(batches, f"{who}: batches")
        self._who = who
        self._batches = batches
        self._current = "its first batch"

    def __iter__(self) -> Iterator[tuple[Tensor, ...] | None]:
        for index, x in enumerate(self._batches):
            self._current = f"batch {index}, x {shown(x)}"
            yield None if x is None else inputs_of(x, f"{self._who}: batch {index}")

    def explaining_misfits(self) -> AbstractContextManager[None]:
        """In this block an error of the model becomes UsageError that names the current batch."""
        return explaining_misfits(
            lambda: f"{self._who}: the model cannot take {self._current}",
            f"Give inputs as in training, without targets: {self._who}(x for x, y in loader)",
        )
