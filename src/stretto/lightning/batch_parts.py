"""A batch of any form (tensors in tuples, lists, dicts and dataclasses), cut into parts and joined again."""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.batch import Examples
from stretto.nn.nested import tensors_of
from stretto.options.checks import shown
from stretto.schedule.even_split import part_sizes

SAME_FOR_ALL = (str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device)


def size_of(batch: Any) -> int | None:
    """The number of examples: the length of the first tensor's first dimension; None without such a tensor."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch.shape[0] if batch.ndim else None
    return next((size for member in members(batch) if (size := size_of(member)) is not None), None)


def members(batch: Any) -> list[Any]:
    """What a container holds; nothing for text and other objects."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, tuple | list):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


def rebuilt(batch: Any, values: Sequence[Any]) -> Any:
    """A container like `batch` with other members."""
    if isinstance(batch, Mapping):
        return type(batch)(zip(batch, values, strict=True))  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*values)
    if isinstance(batch, tuple | list):
        return type(batch)(values)
    return dataclasses.replace(batch, **dict(zip((f.name for f in dataclasses.fields(batch)), values, strict=True)))


def rows(batch: Any, start: int, stop: int, examples: int, where: str = "batch") -> Any:
    """The examples from `start` up to `stop` of a batch of so many `examples`.

    Single numbers, texts and None are the same for all. Raises UsageError for what has another length, or cannot be
    cut.
    """
    if isinstance(batch, Tensor | np.ndarray):
        if not batch.ndim:
            return batch
        if batch.shape[0] != examples:
            raise misfit(where, batch, examples)
        return batch[start:stop]
    if isinstance(batch, SAME_FOR_ALL):
        return batch
    if is_of_rows(batch):
        if len(batch) != examples:
            raise misfit(where, batch, examples)
        return batch[start:stop]
    inside = members(batch)
    if not inside:
        if isinstance(batch, Mapping | tuple | list):
            return batch
        raise UsageError(
            f"{where} is {shown(batch)}, a {type(batch).__name__}, which cannot be cut into micro-batches: give "
            "tensors, arrays or lists with a row for each example, or use a method without micro-batches, "
            "'1f1b(microbatches=1)'"
        )
    names = batch if isinstance(batch, Mapping) else range(len(inside))
    return rebuilt(
        batch,
        [rows(each, start, stop, examples, f"{where}[{name!r}]") for name, each in zip(names, inside, strict=True)],
    )


def is_of_rows(batch: Any) -> bool:
    """Whether a list or a tuple has a row for each example: texts, numbers or dicts, not tensors of all examples."""
    if not isinstance(batch, list | tuple) or hasattr(batch, "_fields") or not batch:
        return False
    if isinstance(batch, tuple):
        return all(isinstance(row, SAME_FOR_ALL) for row in batch)
    return not any(isinstance(row, Tensor | np.ndarray) for row in batch)


def misfit(where: str, batch: Any, examples: int) -> UsageError:
    """The error for a member of a batch that has no row for each example."""
    return UsageError(
        f"{where} is {shown(batch)}, and the batch has {examples} examples: a batch that is cut into micro-batches has "
        "tensors, arrays and lists whose first dimension counts the examples. Use a method without micro-batches, "
        "'1f1b(microbatches=1)', or change the collate function"
    )


def joined(batches: Sequence[Any]) -> Any:
    """The examples of several batches in one. Raises UsageError for what they have for all and that differs."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.dim() else torch.stack(list(batches)).double().mean().to(first)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(list(batches))
    if is_of_rows(first):
        return type(first)(row for batch in batches for row in batch)
    inside = [members(batch) for batch in batches]
    if not inside[0]:
        if any(batch is not first and batch != first for batch in batches):
            raise UsageError(
                f"accumulate_grad_batches: {shown(first)} differs from batch to batch, and a minibatch has one for all "
                "its examples: give a row for each example, or use accumulate_grad_batches=1"
            )
        return first
    return rebuilt(first, [joined(each) for each in zip(*inside, strict=True)])


@dataclasses.dataclass(frozen=True, eq=False)
class StepExamples(Examples):
    """The batches of one minibatch, or a part of it: what a step of the LightningModule gets.

    `kind` is the step's method, such as "training_step". `arguments` are what the step gets after the batch, for each
    of the loader's batches in the minibatch, and `starts` where these begin. `first` is the number of the first example
    here. `path` says which part this is: the micro-batch, then the replica.
    """

    kind: str
    number: int
    batch: Any
    arguments: Sequence[tuple[Any, ...]]
    starts: Sequence[int] = (0,)
    first: int = 0
    size: int | None = None
    path: tuple[int, ...] = ()

    @property
    def owner(self) -> int:
        """Which of the loader's batches the first example belongs to."""
        return max(index for index, start in enumerate(self.starts) if start <= self.first)

    def tensors(self) -> list[Tensor]:
        return tensors_of(self.batch)

    def joined(self, other: Examples) -> "StepExamples":
        """These examples and then the others, as a part of the same step."""
        assert isinstance(other, StepExamples), "both are of one minibatch"
        size = None if self.size is None or other.size is None else self.size + other.size
        return dataclasses.replace(self, batch=joined([self.batch, other.batch]), size=size)

    def cut(self, pieces: int) -> list["StepExamples"]:
        """The parts; each is a batch of the same form."""
        examples = self.size
        if examples is None:
            raise UsageError(
                f"the batch of {self.kind} holds no tensor whose first dimension could count examples, so it cannot be "
                f"cut into {pieces} micro-batches: {shown(self.batch)}"
            )
        bounds = accumulate(part_sizes(examples, pieces), initial=0)
        return [
            dataclasses.replace(
                self,
                batch=rows(self.batch, start, stop, examples),
                first=self.first + start,
                size=stop - start,
                path=(*self.path, part),
            )
            for part, (start, stop) in enumerate(pairwise(bounds))
        ]
