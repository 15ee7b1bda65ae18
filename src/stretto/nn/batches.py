"""The batches that a user gives to look at: each a pair (x, y), and what is told where one does not fit."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from stretto.errors import UsageError
from stretto.nn.batch import check_examples, inputs_of, target_of
from stretto.nn.input_errors import fitting
from stretto.options.checks import refuse, shown

WANTED = "an iterable of batches (x, y), such as a DataLoader or a list"


class Batches:
    """Goes through `batches` once, for `who`, and remembers at which it is. Raises UsageError for what is no batch."""

    def __init__(self, who: str, batches: Iterable[tuple[Any, Any]]) -> None:
        if isinstance(batches, str | bytes | Mapping | type) or not hasattr(batches, "__iter__"):
            refuse(f"{who}: batches", batches, WANTED)
        self._who = who
        self._batches = batches
        self._at = "its first batch"

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for index, batch in enumerate(self._batches):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise UsageError(f"{self._who}: batch {index} is {shown(batch)}: give {WANTED}")
            x, y = batch
            self._at = f"batch {index}, x {shown(x)} and y {shown(y)}"
            if x is not None:  # a process may not read it
                x = inputs_of(x, f"{self._who}: x of batch {index}")
            y = target_of(y, f"{self._who}: y of batch {index}")
            check_examples(x, y, cuts=False)
            yield x, y

    def fitting(self) -> AbstractContextManager[None]:
        """In here an error of the model or the loss is told as UsageError, with the batch."""
        return fitting(
            lambda: f"{self._who}: the model or the loss cannot take {self._at}", "Give batches as in training"
        )
