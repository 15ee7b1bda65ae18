"""A data set: three splits of examples, checked when it is made, and the batches drawn from a split."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.batch import IGNORED
from stretto.nn.seeding import derive


class ExampleRows(Protocol):
    """The examples or targets of a split, [N, ...]: a tensor, or an object that reads rows when indexed."""

    @property
    def shape(self) -> torch.Size:
        """The shape [N, ...] of all examples together."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Tensor: ...


Augment: TypeAlias = Callable[[Any, Tensor, torch.Generator], Tensor]
"""(all examples, rows [B], generator of the random draws) -> the examples of these rows, changed at random."""


class RowReader(ABC):
    """Examples with their targets, read by their rows: what a data set's splits have in common."""

    @property
    def named(self) -> bool:
        """Whether inputs and targets have names, also where the name of a single input is left out."""
        return False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Tensor | slice, seed: int | None = None) -> tuple[Any, Any]:
        """The examples and the targets of these rows, each with its first dimension counting them.

        With a seed, which random changes of the examples are drawn from, they are read for training.
        """

    def first(self, count: int) -> tuple[Any, Any]:
        """The first `count` examples and their targets, or all if there are fewer."""
        return self.read(slice(0, count))

    def batches(
        self, batch_size: int, *, seed: int | None = None, drop_last: bool = False, start: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """Go through the split once in batches of (x [B, ...], y [B, ...]), from batch `start` on.

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
        return self.read_all(self._plan(batch_size, seed, drop_last=drop_last, start=start))

    def epoch(
        self, number: int, batch_size: int, seed: int, *, shuffled: bool = True, drop_last: bool, start: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """Read the batches of an epoch of training, counted from 0, from batch `start` on.

        Batch k depends on the split, `batch_size`, `seed`, the epoch and k alone.
        """
        drawn = derive(seed, "epoch", number)
        return self.read_all(self._plan(batch_size, drawn, shuffled=shuffled, drop_last=drop_last, start=start))

    def rows(self, number: int, batch_size: int, seed: int, batch: int) -> list[int]:
        """The rows of a batch of a shuffled epoch, as `epoch` reads them; epochs and batches are counted from 0."""
        chunks = torch.split(_order(len(self), derive(seed, "epoch", number)), batch_size)
        return chunks[batch].tolist()

    def first_training_batches(self, batch_size: int, seed: int, number: int) -> Iterator[tuple[Any, Any]]:
        """The first full batches of epoch 0, at most `number`, read in this process."""
        plan = self._plan(batch_size, derive(seed, "epoch", 0), drop_last=True)
        return (self.read(rows, drawn) for rows, drawn in islice(plan, number))

    def _plan(
        self, batch_size: int, seed: int | None, *, shuffled: bool = True, drop_last: bool, start: int = 0
    ) -> Iterator[tuple[Tensor | slice, int | None]]:
        # The rows and the seed of each batch, from batch `start` on; without a seed in order.
        stop = len(self) - len(self) % batch_size if drop_last else len(self)
        chunks = torch.split(_order(len(self), seed if shuffled else None)[:stop], batch_size)
        return (
            # In-order batches of tensors are views: nothing is copied.
            (_index(rows, seed), None if seed is None else derive(seed, "augment", k))
            for k, rows in enumerate(chunks)
            if len(rows) and k >= start
        )

    def read_all(self, batches: Iterable[tuple[Tensor | slice, int | None]]) -> Iterator[tuple[Any, Any]]:
        """Read batch after batch, each given by its rows and its seed, as `read` takes them."""
        return (self.read(rows, seed) for rows, seed in batches)


@dataclass(frozen=True, eq=False)
class Split(RowReader):
    """Examples `x` [N, ...] and targets `y`: classes [N], of each pixel [N, H, W], or for language the next
    tokens [N, T]; y is int64.

    A target of -100 (`batch.IGNORED`) is ignored by losses. For translation x is int64 [N, 2, T]: `data.translation`.
    `augment` changes the examples of each shuffled batch at random. Data that do not fit into memory are read when a
    batch needs them: then x and y are not tensors.
    """

    x: ExampleRows = field(repr=False)
    y: ExampleRows = field(repr=False)
    augment: Augment | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise UsageError(f"a split needs as many targets as examples, but x has {len(self.x)} and y {len(self.y)}")

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Tensor | slice, seed: int | None = None) -> tuple[Any, Any]:
        """Index x and y; with a seed, `augment` the examples."""
        if seed is None or self.augment is None or isinstance(rows, slice):
            return self.x[rows], self.y[rows]
        return self.augment(self.x, rows, torch.Generator("cpu").manual_seed(seed)), self.y[rows]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named task with its three splits; `num_classes` is the size of the vocabulary if targets are tokens.

    A user's own data may have no test split. `text` turns tokens into text, for the BLEU of translations.
    """

    name: str
    task: Literal["classification", "language", "translation", "segmentation"]
    num_classes: int
    train: Split
    validation: Split
    test: Split | None
    description: str
    options: Mapping[str, object]
    text: Callable[[Sequence[int]], str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            split: Split | None = getattr(self, name)
            if split is not None:
                self._check(name, split)
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


def forever(split: RowReader, batch_size: int, seed: int, *, start: int = 0) -> Iterator[tuple[Any, Any]]:
    """An endless iterator of full batches, shuffled differently in each epoch, from batch `start` on.

    Batch k depends on (split, batch_size, seed, k) alone, so a run that resumes after k batches continues with
    `start=k` as if it had never stopped. Raises UsageError for sizes that cannot work.
    """
    if start < 0:
        raise UsageError(f"start={start} must be at least 0")
    split.batches(batch_size, drop_last=True)  # refuses a bad size now rather than at the first batch
    first, skip = divmod(start, len(split) // batch_size)
    epochs = (
        split.epoch(number, batch_size, seed, drop_last=True, start=skip if number == first else 0)
        for number in count(first)
    )
    return chain.from_iterable(epochs)


def _order(length: int, seed: int | None) -> Tensor:
    if seed is None:
        return torch.arange(length, device="cpu")
    return torch.randperm(length, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def _index(rows: Tensor, seed: int | None) -> Tensor | slice:
    return slice(int(rows[0]), int(rows[-1]) + 1) if seed is None else rows


# The splits are part of the data set's meaning: another seed would make figures incomparable, so it is no option.
_SEED = 0


def stratify(labels: Tensor, cuts: tuple[float, ...]) -> list[Tensor]:
    """The rows of several splits, shuffled, each with its share of every class in `labels`, int64 [N].

    `cuts` are the shares at which one split ends and the next one begins: (0.6, 0.8) for 60/20/20.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
    place = torch.empty(len(labels), dtype=torch.float64)  # position of an example within its class, in [0, 1)
    for label in range(int(labels.max()) + 1):
        members = order[labels[order] == label]
        place[members] = torch.arange(len(members), dtype=torch.float64) / len(members)
    split = torch.bucketize(place[order], torch.tensor(cuts, dtype=torch.float64), right=True)
    return [order[split == k] for k in range(len(cuts) + 1)]
