"""A data set: three splits of examples, checked when it is made, and the batches drawn from a split."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.batch import IGNORED
from stretto.nn.seeding import derive


class Examples(Protocol):
    """The examples or targets of a split, [N, ...]: a tensor, or an object that reads rows when indexed."""

    @property
    def shape(self) -> torch.Size:
        """The shape [N, ...] of all examples together."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Tensor: ...


Augment: TypeAlias = Callable[[Any, Tensor, torch.Generator], Tensor]
"""(all examples, rows [B], generator of the random draws) -> the examples of these rows, changed at random."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples `x` [N, ...] and targets `y`: classes [N], of each pixel [N, H, W], or for language the next
    tokens [N, T]; y is int64.

    A target of -100 (`batch.IGNORED`) is ignored by losses. For translation x is int64 [N, 2, T]: `data.translation`.
    `augment` changes the examples of each shuffled batch at random. Data that do not fit into memory are read when a
    batch needs them: then x and y are not tensors.
    """

    x: Examples = field(repr=False)
    y: Examples = field(repr=False)
    augment: Augment | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise UsageError(f"a split needs as many targets as examples, but x has {len(self.x)} and y {len(self.y)}")

    def __len__(self) -> int:
        return len(self.x)

    def batches(
        self, batch_size: int, *, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the split once in batches of (x [B, ...], y [B, ...]).

        Without a seed the examples come in order; with one they are shuffled, without a change to the global random
        state. The last batch may be smaller, unless `drop_last`. Raises UsageError for a batch size that cannot work,
        in this call, not at the first batch.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size} must be at least 1")
        if drop_last and batch_size > len(self):
            raise UsageError(
                f"batch_size={batch_size} with drop_last leaves no batch of a split of {len(self)} examples; "
                f"take a batch_size of at most {len(self)}"
            )
        stop = len(self) - len(self) % batch_size if drop_last else len(self)
        chunks = torch.split(_order(len(self), seed)[:stop], batch_size)
        # In-order batches are views: nothing is copied.
        return (
            (self._examples(rows, seed, k), self.y[_index(rows, seed)]) for k, rows in enumerate(chunks) if len(rows)
        )

    def _examples(self, rows: Tensor, seed: int | None, k: int) -> Tensor:
        if seed is None or self.augment is None:
            return self.x[_index(rows, seed)]
        return self.augment(self.x, rows, torch.Generator("cpu").manual_seed(derive(seed, "augment", k)))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named task with its three splits; `num_classes` is the size of the vocabulary if targets are tokens.

    `text` turns tokens into text, for the BLEU of translations.
    """

    name: str
    task: Literal["classification", "language", "translation", "segmentation"]
    num_classes: int
    train: Split
    validation: Split
    test: Split
    description: str
    options: Mapping[str, object]
    text: Callable[[Sequence[int]], str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for split in ("train", "validation", "test"):
            self._check(split, getattr(self, split))
        y = self.train.y
        if self.task == "classification" and isinstance(y, Tensor) and y.min() == y.max():
            raise UsageError(
                f"data set {self.name!r}: all {len(y)} examples of split 'train' are of class {int(y[0])}, so "
                "there is nothing to learn; a train split needs at least two classes"
            )

    def _check(self, name: str, split: Split) -> None:
        """Raise UsageError for an empty split, or targets that are no classes of this data set."""
        if not len(split):
            raise UsageError(
                f"data set {self.name!r}: split {name!r} is empty; give every split at least one example "
                "(more data, or a smaller context)"
            )
        if not isinstance(split.y, Tensor):
            return  # read when it is needed
        low, high = int(split.y.min()), int(split.y.max())
        if low == IGNORED:
            low = int(torch.where(split.y == IGNORED, high, split.y).min())
        if low < 0 or high >= self.num_classes:
            raise UsageError(
                f"data set {self.name!r}: the targets of split {name!r} lie in {low}..{high}, "
                f"but num_classes={self.num_classes} allows 0..{self.num_classes - 1}"
            )


def forever(split: Split, batch_size: int, seed: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless iterator of full batches, shuffled differently in each epoch, from batch `start` on.

    Batch k depends on (split, batch_size, seed, k) alone, so a run that resumes after k batches continues with
    `start=k` as if it had never stopped. Raises UsageError for sizes that cannot work.
    """
    if start < 0:
        raise UsageError(f"start={start} must be at least 0")
    split.batches(batch_size, drop_last=True)  # refuses a bad size now rather than at the first batch
    return _epochs(split, batch_size, seed, start)


def _epochs(split: Split, batch_size: int, seed: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    first, skip = divmod(start, len(split) // batch_size)
    for epoch in count(first):
        for k, batch in enumerate(split.batches(batch_size, seed=derive(seed, "epoch", epoch), drop_last=True)):
            if epoch > first or k >= skip:
                yield batch


def _order(length: int, seed: int | None) -> Tensor:
    if seed is None:
        return torch.arange(length, device="cpu")
    return torch.randperm(length, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def _index(rows: Tensor, seed: int | None) -> Tensor | slice:
    return slice(int(rows[0]), int(rows[-1]) + 1) if seed is None else rows
