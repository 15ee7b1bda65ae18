"""A batch of any form (tensors in tuples, lists, dicts and dataclasses), cut into parts and joined again."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.batch import Examples
from stretto.options.checks import shown
from stretto.schedule.even_split import part_sizes


def size_of(batch: Any) -> int | None:
    """The number of examples: the length of the first tensor's first dimension; None without such a tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
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

    Numbers and objects that are not one an example stay as they are. Raises UsageError for a tensor of another length.
    """
    if isinstance(batch, Tensor):
        if not batch.dim():
            return batch
        if batch.shape[0] != examples:
            raise UsageError(
                f"{where} is {shown(batch)}, and the batch has {examples} examples: a batch that is cut into "
                "micro-batches has tensors whose first dimension counts the examples. Use a method without "
                "micro-batches, '1f1b(microbatches=1)', or change the collate function"
            )
        return batch[start:stop]
    if isinstance(batch, list) and len(batch) == examples and not any(isinstance(row, Tensor) for row in batch):
        return batch[start:stop]
    inside = members(batch)
    if not inside:
        return batch
    names = batch if isinstance(batch, Mapping) else range(len(inside))
    return rebuilt(
        batch,
        [rows(each, start, stop, examples, f"{where}[{name!r}]") for name, each in zip(names, inside, strict=True)],
    )


def joined(batches: Sequence[Any]) -> Any:
    """The examples of several batches in one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.dim() else torch.stack(list(batches)).double().mean().to(first)
    if isinstance(first, list) and not any(isinstance(row, Tensor) for row in first):
        return [row for batch in batches for row in batch]
    inside = [members(batch) for batch in batches]
    if not inside[0]:
        return first
    return rebuilt(first, [joined(each) for each in zip(*inside, strict=True)])


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch, in its order."""
    return [batch] if isinstance(batch, Tensor) else [each for part in members(batch) for each in tensors_of(part)]


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
        """Those of the batch, in whatever they are."""
        return tensors_of(self.batch)

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


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with `function` of each of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    inside = members(value)
    return rebuilt(value, [mapped(function, each) for each in inside]) if inside else value
