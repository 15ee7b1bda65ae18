"""The batches of one epoch after another, as `Trainer.fit` goes through them, and their state in a checkpoint."""

import hashlib
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from stretto.data.dataset import RowReader, Split
from stretto.data.user_data import (
    TensorSplit,
    add_to_digest,
    digest_of,
    is_default,
    is_hugging_face,
    is_pair,
    pair_of,
    split_of,
)
from stretto.errors import UsageError
from stretto.nn.batch import Examples, examples_of, first_size, refuse_workers
from stretto.options.checks import shown
from stretto.trainer.microbatches import MinibatchCut

BATCH_SIZE = 32
TENSOR, ARRAY = "stretto tensor", "stretto array"


class Needs(NamedTuple):
    """What the batches of a trainer need: which of x and y this process reads, and how those to train on are cut."""

    x: bool
    y: bool
    cut: MinibatchCut | None = None

    @property
    def examples(self) -> int:
        return 1 if self.cut is None else self.cut.parts

    def of(self, x: Any, y: Any) -> tuple[Any, Any]:
        """A batch as this process reads it."""
        return x if self.x else None, y if self.y else None

    def too_few(self, examples: int, reason: str, *remedies: str) -> UsageError:
        """The refusal of batches with fewer examples than that."""
        return UsageError(reason) if self.cut is None else self.cut.too_few(examples, reason, *remedies)


class Batch(NamedTuple):
    """A batch and its number of examples; x or y is None where this process does not read it."""

    examples: int
    x: Any
    y: Any


class Feed(ABC):
    """Data as batches. `batch_size` is None where the data come in batches of their own.

    `per_epoch` is the number of batches of an epoch, None if it is not known. `dropped` is the number of examples of a
    batch that was left out because it is too small; 0 if there was none.
    """

    where: str
    batch_size: int | None
    per_epoch: int | None
    dropped: int

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, counted from 0, from batch `start` on."""

    @abstractmethod
    def in_order(self) -> Iterator[tuple[Any, Any]]:
        """All batches once, for an evaluation: (x, y) as this process reads them."""

    @property
    @abstractmethod
    def extent(self) -> str:
        """How much data there are, as text."""

    def digest(self) -> str | None:
        """A text that differs where data differ; None where that cannot be told, or this process reads none."""
        return None

    @abstractmethod
    def refuse_once(self) -> None:
        """Raise UsageError for data that can be gone through once only."""

    def state(self) -> Any:
        """What `restore` needs besides the epoch and the batch; None if nothing."""
        return None

    def restore(self, state: Any) -> str | None:
        """Go on from `state` with the next epoch asked for. Returns what to warn of where that cannot be exact."""
        return None


class Rows(Feed):
    """Data that are read by their rows: every epoch in an order drawn from `seed`, or in their own without `shuffled`.

    Batch k of an epoch depends on the data, the size, the seed, the epoch and k alone.
    """

    batch_size: int
    per_epoch: int

    def __init__(
        self, split: RowReader, where: str, batch_size: int, needs: Needs, *, shuffled: bool, drop_last: bool, seed: int
    ) -> None:
        self.split, self.where = split, where
        self._needs, self._shuffled, self.batch_size, self.seed = needs, shuffled, batch_size, seed
        self.per_epoch, rest = divmod(len(split), batch_size)
        self.dropped = rest if rest < needs.examples and not drop_last else 0
        self._drop_last = drop_last or rest < needs.examples
        self.per_epoch += not self._drop_last
        if not self.per_epoch or batch_size < needs.examples:
            raise needs.too_few(
                min(batch_size, len(split)),
                f"{where} has {len(split)} examples, which make no batch that can be trained: batch_size={batch_size}"
                f"{' with drop_last' if drop_last else ''}, and the method's micro-batches and the replicas need at "
                f"least {needs.examples} examples",
                "another batch_size",
            )

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Read the rows of each batch; where nothing is needed, nothing is read."""
        size, shuffled, drop_last = self.batch_size, self._shuffled, self._drop_last
        sizes = (min(size, len(self.split) - k * size) for k in range(start, self.per_epoch))
        if not (self._needs.x or self._needs.y):
            return (Batch(examples, None, None) for examples in sizes)
        batches = self.split.epoch(number, size, self.seed, shuffled=shuffled, drop_last=drop_last, start=start)
        return (Batch(examples, *self._needs.of(x, y)) for examples, (x, y) in zip(sizes, batches, strict=False))

    def rows(self, epoch: int, batch: int) -> list[int]:
        """The rows of a batch of an epoch of shuffled data, both counted from 0."""
        return self.split.rows(epoch, self.batch_size, self.seed, batch)

    def in_order(self) -> Iterator[tuple[Any, Any]]:
        if not (self._needs.x or self._needs.y):
            return itertools.repeat((None, None), math.ceil(len(self.split) / self.batch_size))
        return itertools.starmap(self._needs.of, self.split.batches(self.batch_size))

    def refuse_once(self) -> None:
        """Do nothing: rows can be read again."""

    @property
    def extent(self) -> str:
        return f"{len(self.split)} examples"

    def digest(self) -> str | None:
        """That of `digest_of`; None for items that differ each time that they are read."""
        if not (self._needs.x or self._needs.y):
            return None
        digest = digest_of(self.split)
        return digest if isinstance(self.split, Split | TensorSplit) or digest_of(self.split) == digest else None


class Stream(Feed):
    """An iterable of batches, gone through as it is, from its beginning in every epoch.

    A DataLoader draws its order, and its items what they draw, from the global generators or its own, as in any loop.
    `compare` is called with the digest of the first batch of each epoch: a collective on several processes.
    """

    batch_size = None

    def __init__(self, batches: Any, where: str, needs: Needs, compare: Callable[[str, str], None] | None) -> None:
        self._batches, self.where, self._needs, self._compare = batches, where, needs, compare
        self._is_list = isinstance(batches, list | tuple)
        self._has_state = all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict"))
        self._follows_generators = not self._has_state and follows_generators(batches)
        self._epoch_states: dict[str, Any] | None = None  # of the generators before the epoch
        self._restored: dict[str, Any] | None = None
        self._begun = False
        self.dropped = 0  # examples of the first batch that was too small
        try:
            self.per_epoch = len(batches)
        except (TypeError, NotImplementedError):
            self.per_epoch = None

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        restored, self._restored = self._restored, None
        skipped = start if self._is_list or restored is not None else 0
        if restored is not None:
            set_generators(self._batches, restored["epoch" if start else "now"])
        if self._follows_generators:
            self._epoch_states = generator_states(self._batches)
        for index, batch in enumerate(self._again()):
            x, y = self._pair(index, batch)
            examples = examples_of(x, y)
            if index == 0 and self._compare is not None:
                self._compare(f"{self.where}, first batch of epoch {number + 1}", digest_of_batch(x, y))
            if examples < self._needs.examples:
                self.dropped = self.dropped or examples
                continue
            if skipped:
                skipped -= 1
                if not skipped and restored is not None:
                    set_generators(self._batches, restored["now"])
                continue
            yield Batch(examples, *self._needs.of(x, y))

    def _again(self) -> Iterator[Any]:
        if self._begun:
            self.refuse_once()
        self._begun = True
        refuse_workers(self._batches, self.where)
        return iter(self._batches)

    def refuse_once(self) -> None:
        """Raise UsageError for an iterator, and where a sampler to train with has to be told of each epoch."""
        for sampler in samplers_of(self._batches) if self._needs.cut is not None else ():
            if hasattr(sampler, "set_epoch"):
                raise UsageError(
                    f"{self.where} is a DataLoader with a {type(sampler).__name__}, whose set_epoch has to be called "
                    "before each epoch: for each epoch call it, and then fit(..., epochs=1)"
                )
        if isinstance(self._batches, Iterator):
            raise UsageError(
                f"{self.where} is {shown(self._batches)}, an iterator, which can be gone through once: give an object "
                "that makes a new iterator for each epoch (a DataLoader, a list), or train for one epoch"
            )

    def _pair(self, index: int, batch: Any) -> tuple[Any, Any]:
        where = f"{self.where}: batch {index}"
        batch = paired(self._batches, batch, where)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(f"{where} is {shown(batch)}: give pairs (x, y) of batches, or dicts with a target")
        x, y = pair_of(batch, where)
        if not first_size(x):
            raise UsageError(
                f"{where}: x is {shown(x)}: give tensors whose first dimension counts the examples. Single examples "
                "become batches in torch.utils.data.DataLoader(data, batch_size=...)"
            )
        return x, y

    def in_order(self) -> Iterator[tuple[Any, Any]]:
        for index, batch in enumerate(self._again()):
            yield self._needs.of(*self._pair(index, batch))

    @property
    def extent(self) -> str:
        """The kind and the length; the first batches are compared when they are read."""
        return f"a {type(self._batches).__name__} of {self.per_epoch or 'an unknown number of'} batches"

    def state(self) -> Any:
        """The state of an iterable that has one, or of the generators that a DataLoader draws from."""
        if self._follows_generators:
            return {"epoch": self._epoch_states, "now": generator_states(self._batches)}
        return self._batches.state_dict() if self._has_state else None

    def restore(self, state: Any) -> str | None:
        """Load the iterable's state. Without one a list goes on where it was, all others start again."""
        if state is not None and self._has_state:
            self._batches.load_state_dict(state)
        elif state is not None and self._follows_generators:
            self._restored = state
        elif not self._is_list:
            return (
                f"{self.where} is {shown(self._batches)}, without state_dict and load_state_dict: it starts again from "
                "its beginning, so that this run differs from one that was not interrupted"
            )
        return None


def paired(batches: Any, batch: Any, where: str) -> Any:
    """One of the `batches` as (x, y) if it is a dict, or without targets, which are None; any other as it is."""
    of_tensors = type(getattr(batches, "dataset", None)) is TensorDataset
    if of_tensors and isinstance(batch, tuple | list) and len(batch) > 2:
        batch = (tuple(batch[:-1]), batch[-1])
    if isinstance(batch, Tensor) and isinstance(batches, DataLoader):
        batch = (batch,)
    if isinstance(batch, tuple | list) and len(batch) == 1 and isinstance(batch[0], Tensor | np.ndarray):
        return batch[0], None
    return pair_of(batch, where) if isinstance(batch, Mapping) else batch


def cut_rows(data: Any, where: str) -> Any:
    """Batches of data that are none yet: a pair of tensors or arrays, or a Dataset; all other data as they are."""
    if isinstance(data, tuple | list):
        rows = is_pair(data) and not is_stream(data) and not all(isinstance(part, tuple | list) for part in data)
    else:
        indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        rows = isinstance(data, RowReader) or is_hugging_face(data) or (indexed and not hasattr(data, "__iter__"))
    return split_of(data, where).batches(BATCH_SIZE) if rows else data


def find_feed(
    data: Any,
    where: str,
    batch_size: int | None,
    needs: Needs,
    *,
    seed: int,
    compare: Callable[[str, str], None] | None = None,
    loaders_as_they_are: bool = False,
) -> Feed:
    """The batches of what a user gave. `batch_size` None: that of a DataLoader, else BATCH_SIZE.

    With `loaders_as_they_are` no DataLoader's Dataset is read by rows: going through a loader draws from a generator.

    Raises UsageError for data of no known form, for empty data, and for a batch size where batches are given.
    """
    if is_stream(data) or (loaders_as_they_are and isinstance(data, DataLoader)):
        if batch_size is not None:
            raise UsageError(
                f"fit: batch_size={batch_size}, but {where} is {shown(data)}, which makes batches itself: leave "
                "batch_size out"
            )
        if isinstance(data, list | tuple) and not data:
            raise UsageError(f"fit: {where}={shown(data)} has no batches: give at least one")
        return Stream(data, f"fit: {where}", needs, compare)
    split = split_of(data, f"fit: {where}")
    if not len(split):
        raise UsageError(f"fit: {where} is empty: give at least one example")
    loader = data if isinstance(data, DataLoader) else None
    if batch_size is None:
        batch_size = BATCH_SIZE if loader is None or loader.batch_size is None else loader.batch_size
    return Rows(
        split,
        f"fit: {where}",
        batch_size,
        needs,
        shuffled=loader is None or isinstance(loader.sampler, RandomSampler),
        drop_last=loader is not None and loader.drop_last,
        seed=seed,
    )


def is_stream(data: Any) -> bool:
    """Whether data are batches already, or can only be gone through, rather than read by rows."""
    if isinstance(data, RowReader | str | bytes | Mapping | Tensor | np.ndarray | type):
        return False
    if isinstance(data, DataLoader):
        return not is_default(data)
    if isinstance(data, list | tuple):
        pairs = len(data) > 0 and all(isinstance(part, list | tuple) and len(part) == 2 for part in data)
        return (isinstance(data, list) and pairs) or not is_pair(data)
    if isinstance(data, IterableDataset):
        return True
    if is_hugging_face(data):
        return not hasattr(data, "__len__")
    rows = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, Iterable) and not rows


def digest_of_batch(*parts: Any) -> str:
    """Sixteen characters that differ for batches that differ, in more than the order of a dict."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapping):
            part = [part[name] for name in sorted(part, key=str)]
        add_to_digest(digest, part.tensors() if isinstance(part, Examples) else part)
    return digest.hexdigest()[:16]


def samplers_of(loader: Any) -> list[Any]:
    """What decides the order of a DataLoader's examples."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    given = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in given if sampler is not None]


def follows_generators(loader: Any) -> bool:
    """Whether it is a DataLoader that gives the same batches again from the same states of all generators.

    Samplers of one's own, iterable datasets and workers that stay may remember more.
    """
    known = ("torch.utils.data.sampler", "builtins")
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and not loader.persistent_workers
        and all(type(sampler).__module__ in known for sampler in samplers_of(loader))
    )


def generator_states(loader: Any) -> dict[str, Any]:
    """The states of all generators that a DataLoader's batches may draw from: the global ones and its own."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "own": [generator.get_state() for generator in generators_of(loader)],
    }


def set_generators(loader: Any, states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    for generator, state in zip(generators_of(loader), states["own"], strict=False):
        generator.set_state(state)


def generators_of(loader: Any) -> list[torch.Generator]:
    given = [getattr(part, "generator", None) for part in (loader, *samplers_of(loader))]
    return [generator for generator in given if isinstance(generator, torch.Generator)]


def packed(state: Any) -> Any:
    """Replace tensors and arrays by (tag, type, shape, bytes), in dicts, lists and tuples."""
    if isinstance(state, Tensor):
        array = state.detach().cpu().contiguous()
        content = array.flatten().view(torch.uint8).numpy().tobytes()
        return (TENSOR, str(array.dtype).removeprefix("torch."), list(array.shape), content)
    if isinstance(state, np.ndarray | np.generic):
        return (ARRAY, str(state.dtype), list(state.shape), state.tobytes())
    if isinstance(state, Mapping):
        return {key: packed(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([packed(value) for value in state])
    return state


def unpacked(state: Any) -> Any:
    """The state that `packed` was given; numbers of NumPy come back as arrays without dimensions."""
    if isinstance(state, tuple) and len(state) == 4 and state[0] in (TENSOR, ARRAY):
        kind, dtype, shape, content = state
        if kind == ARRAY:
            return np.frombuffer(content, dtype=dtype).reshape(shape).copy()
        flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)) if content else torch.empty(0)
        return flat.to(getattr(torch, dtype)).reshape(shape)
    if isinstance(state, dict):
        return {key: unpacked(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([unpacked(value) for value in state])
    return state
