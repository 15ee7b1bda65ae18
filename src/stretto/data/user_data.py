"""The user's own data: pairs of tensors, torch Datasets, DataLoaders or Hugging Face datasets, read as splits."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing import current_process
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from stretto.data.dataset import Dataset, RowReader, Split
from stretto.errors import UsageError
from stretto.nn.batch import IGNORED, NO_TARGETS, as_tensor
from stretto.nn.preserve import python_generators_restored
from stretto.nn.state_check import hash_of
from stretto.options.checks import shown
from stretto.options.user_errors import error_place, explained

FORMS = (
    "a pair (x, y) of tensors or arrays (x may be a tuple or a dict of them), a torch Dataset, a DataLoader, or a "
    "Hugging Face dataset"
)
RETURNED = f"(train, validation) or (train, validation, test), each {FORMS}"
TARGETS = ("labels", "label", "targets", "target", "y")  # names of what is the target, where examples are dicts
LOST = {  # arguments of a DataLoader whose say a run would lose
    "generator": "a run draws the order of its examples from its own seed",
    "worker_init_fn": "what items draw depends on the run's seed and the batch alone",
    "persistent_workers": "the workers of a run end with each epoch",
}
KEPT = ("num_workers", "timeout", "multiprocessing_context", "prefetch_factor", "pin_memory")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
SAMPLED = 64  # items of a Dataset that its digest reads, evenly spread


@dataclass(frozen=True, eq=False)
class UserData:
    """Splits of which nothing is known but how to read them; `test` may be missing.

    `digest` differs where data do: it covers all of tensors and arrays, and of a Dataset the length and SAMPLED items.
    `batch_size` is that of the DataLoader which the train split was, None for any other.
    """

    name: str
    train: RowReader
    validation: RowReader
    test: RowReader | None
    description: str
    digest: str
    batch_size: int | None = None
    task: Literal["user"] = "user"
    text: None = field(default=None, repr=False)

    def for_networks(self) -> Dataset | None:
        """The same splits for built-in networks: numbers with classes [N], or tokens [N, T] with the next tokens.

        None for all other data, and without a test split.
        """
        splits = [self.train, self.validation, *([] if self.test is None else [self.test])]
        if not all(isinstance(split, Split) and is_classes(split.y) for split in splits):
            return None
        train, validation, test = (*splits, None)[:3]
        assert isinstance(train, Split)
        assert isinstance(validation, Split)
        assert test is None or isinstance(test, Split)
        x, y = train.first(1)
        if x.is_floating_point() and y.dim() == 1:
            task: Literal["classification", "language"] = "classification"
        elif not x.is_floating_point() and x.dim() == 2 and y.shape == x.shape:
            task = "language"
        else:
            return None
        tokens = [split.x for split in splits if isinstance(split, Split)] if task == "language" else []
        targets = [split.y for split in splits if isinstance(split, Split)]
        classes = max(int(values[:].max()) for values in (*tokens, *targets)) + 1
        return Dataset(self.name, task, classes, train, validation, test, self.description, {})


def is_classes(y: Any) -> bool:
    """Whether targets are classes: whole numbers from 0, or -100 where they are ignored."""
    return isinstance(y, Tensor) and y.dtype == torch.int64 and bool(((y >= 0) | (y == IGNORED)).all())


@dataclass(frozen=True, eq=False)
class TensorSplit(RowReader):
    """Examples and targets as tensors, or tuples and dicts of tensors with one first dimension."""

    x: Any = field(repr=False)
    y: Any = field(repr=False)

    def __len__(self) -> int:
        return len(tree_flatten(self.x)[0][0])

    def read(self, rows: Tensor | slice, seed: int | None = None) -> tuple[Any, Any]:
        """Index every tensor."""
        return tree_map(lambda tensor: tensor[rows], self.x), tree_map(lambda tensor: tensor[rows], self.y)


class ItemSplit(RowReader):
    """The items of a map-style Dataset, collated into batches.

    `workers` are arguments of the DataLoader whose processes read ahead. A process that may not start others, as those
    of --jobs, reads by itself: the numbers are the same.

    Whatever items draw at random (from torch, `random` or NumPy) depends on the run's seed and the batch alone.
    """

    def __init__(
        self, items: Any, collate: Callable[[list[Any]], Any], where: str, workers: Mapping[str, Any] | None = None
    ) -> None:
        self._items, self._collate, self._where, self._workers = items, collate, where, workers or {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def named(self) -> bool:
        """Whether items make a dict."""
        return isinstance(self._whole([0], 0), Mapping)

    def read(self, rows: Tensor | slice, seed: int | None = None) -> tuple[Any, Any]:
        """Read these items and collate them."""
        numbers = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return pair_of(self._whole(list(numbers), 0 if seed is None else seed), self._where)

    def _whole(self, numbers: list[int], seed: int) -> Any:
        # These items as a batch, as the collate function gives it.
        with drawing_from(seed):
            return collated(self._collate, fetch(self._items, numbers, self._where), self._where)

    def read_all(self, batches: Iterable[tuple[Tensor | slice, int | None]]) -> Iterator[tuple[Any, Any]]:
        """Read batch after batch, ahead of their use if there are workers."""
        if not self._workers or current_process().daemon:
            return super().read_all(batches)
        readers: Any = _Reading(self)
        return iter(DataLoader(readers, batch_size=None, sampler=[*batches], **self._workers))


class _Reading:
    """A split as a Dataset whose items are its batches, for the processes of a DataLoader."""

    def __init__(self, split: ItemSplit) -> None:
        self._split = split

    def __getitem__(self, batch: tuple[Tensor | slice, int | None]) -> tuple[Any, Any]:
        return self._split.read(*batch)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed the global generators of torch (on the CPU), `random` and NumPy; they are restored afterwards."""
    with torch.random.fork_rng(devices=[]), python_generators_restored():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


def fetch(items: Any, numbers: list[int], where: str) -> list[Any]:
    """The items as a DataLoader reads them: all at once from a Dataset with `__getitems__`.

    Raises UsageError with the item that fails, its file and line.
    """
    together = getattr(items, "__getitems__", None)
    if together:
        read: list[Any] = item(together, numbers, f"{where}: items {shown(numbers)}")
        return read
    return [item(items.__getitem__, number, f"{where}: item {number}") for number in numbers]


def item(read: Callable[[Any], Any], index: int | list[int], what: str) -> Any:
    """`read(index)`. Raises UsageError, with the text `what`, if the user's function does."""
    with explained(f"{what} raised", passing=()):
        return read(index)


def collated(collate: Callable[[list[Any]], Any], items: list[Any], where: str) -> Any:
    """The items as a batch. Raises UsageError for items that make none, as those of unequal shapes."""
    try:
        return collate(items)
    except Exception as error:
        pairs = any(isinstance(item, tuple | list) for item in items)
        forms = [form(tuple(item) if isinstance(item, list) else item, whole=True) for item in items]
        first, other = forms[0], next((other for other in forms if other != forms[0]), None)
        differ = "" if other is None or not pairs else f", such as {first} and {other}"
        own = "" if collate is default_collate else " by the DataLoader's collate_fn"
        raise UsageError(
            f"{where}: {len(items)} items{differ} cannot be made a batch{own}: {type(error).__name__}: "
            f"{error}{error_place(error)}. Let all items have one shape, or give a DataLoader with a collate_fn that "
            "pads"
        ) from error


def pair_of(batch: Any, where: str) -> tuple[Any, Any]:
    """(x, y) of a collated batch: a pair, or a dict in which one of TARGETS is the target and the others are inputs."""
    if isinstance(batch, Mapping):
        names = [name for name in TARGETS if name in batch]
        if len(names) == 1 and len(batch) > 1:
            inputs = {name: value for name, value in batch.items() if name != names[0]}
            return (inputs if len(inputs) > 1 else next(iter(inputs.values()))), batch[names[0]]
        raise UsageError(
            f"{where}: its items are dicts with {', '.join(map(repr, batch)) or 'nothing'}: give the target one of the "
            f"names {', '.join(TARGETS)}, and at least one input beside it"
        )
    if isinstance(batch, tuple | list) and len(batch) == 2:
        x, y = batch
        return (tuple(x) if isinstance(x, list) else x), y
    raise UsageError(f"{where}: its items are {shown(batch)}, collated: give pairs (x, y), or dicts with a target")


def user_data(value: Any, name: str) -> UserData:
    """The splits in `value`, which is what a user's function returned; `name` is said in messages.

    Raises UsageError for anything that is not RETURNED, splits that are empty, and pairs of unequal lengths.
    """
    if isinstance(value, Mapping) and "train" in value and "validation" in value:
        value = tuple(value[split] for split in ("train", "validation", "test") if split in value)
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        raise UsageError(f"{name} returned {shown(value)}: return {RETURNED}")
    names = ("train", "validation", "test")
    splits = [split_of(part, f"{name}: {split}") for part, split in zip(value, names, strict=False)]
    for split, which in zip(splits, names, strict=False):
        if not len(split):
            raise UsageError(f"{name}: {which} is empty: give every split at least one example")
    sizes = ", ".join(f"{len(split):,} {which}" for split, which in zip(splits, names, strict=False))
    x, y = splits[0].first(1)
    description = f"{name}: {sizes} examples of {form(x)}, targets {form(y)}."
    digest = sha256("".join(digest_of(split) for split in splits).encode()).hexdigest()[:16]
    loader = value[0] if isinstance(value[0], DataLoader) else None
    test = splits[2] if len(splits) == 3 else None
    batch_size = None if loader is None else loader.batch_size
    return UserData(name, splits[0], splits[1], test, description, digest, batch_size)


def split_of(value: Any, where: str) -> RowReader:
    """A split of any of FORMS. Raises UsageError for all others, with `where` it was given."""
    if isinstance(value, RowReader):
        return value
    if isinstance(value, DataLoader):
        return of_loader(value, where)
    if type(value) is TensorDataset:
        *x, y = value.tensors
        if not x:
            raise UsageError(f"{where} is a TensorDataset of one tensor: {NO_TARGETS}")
        return of_pair(x[0] if len(x) == 1 else tuple(x), y, where)
    if is_pair(value):
        x, y = value
        return of_pair(x, y, where)
    if is_hugging_face(value):
        return ItemSplit(of_numbers(value, where), default_collate, where)
    refuse_without_length(value, where)
    if not hasattr(value, "__getitem__") or isinstance(value, str | bytes | Tensor | np.ndarray | Mapping):
        raise UsageError(f"{where} is {shown(value)}: give {FORMS}")
    return ItemSplit(value, default_collate, where)


def is_pair(value: Any) -> bool:
    """Whether a value is (x, y): tensors, arrays, or tuples and dicts of them.

    Two dicts in a list are two batches, and so are two that have the same keys, a target's name among them.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if all(isinstance(part, Mapping) for part in value):
        labelled = any(name in value[0] for name in TARGETS) and set(value[0]) == set(value[1])
        if labelled or isinstance(value, list):
            return False
    return all(part is not None and tree_flatten(part)[0] for part in value) and all(
        isinstance(leaf, Tensor | np.ndarray) and leaf.ndim for leaf in tree_flatten(tuple(value))[0]
    )


def of_pair(x: Any, y: Any, where: str) -> RowReader:
    """A split of tensors or arrays. Raises UsageError for unequal lengths."""
    x, y = (tree_map(lambda leaf: as_tensor(leaf, where), part) for part in (x, y))
    x = tuple(x) if isinstance(x, list) else x
    lengths = {len(leaf) for leaf in tree_flatten((x, y))[0]}
    if len(lengths) > 1:
        raise UsageError(
            f"{where}: x is {form(x, whole=True)} and y is {form(y, whole=True)}, of unequal lengths: the first "
            "dimension of each counts the examples"
        )
    return Split(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else TensorSplit(x, y)


def of_loader(loader: "DataLoader[Any]", where: str) -> RowReader:
    """The Dataset of a DataLoader with its collate function and what it says of its workers.

    Order and batch size are the run's. Raises UsageError where the loader has a say in them that would be lost.
    """
    remedy = "give the Dataset itself, or train with Trainer.fit, which goes through a loader as it is"
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(f"{where}: a DataLoader of an IterableDataset has no length and no rows: {remedy}")
    if type(loader) is not DataLoader:
        raise UsageError(f"{where}: a {type(loader).__name__}, which may give other batches than its Dataset: {remedy}")
    for name, lost in LOST.items():
        if getattr(loader, name):
            raise UsageError(f"{where}: a DataLoader with {name}={shown(getattr(loader, name))}; {lost}: {remedy}")
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UsageError(f"{where}: a DataLoader with batch_size=None, whose items are batches already: {remedy}")
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(f"{where}: a DataLoader with batch_sampler={shown(loader.batch_sampler)}: {remedy}")
    refuse_without_length(loader.dataset, where)
    if not only_shuffles(loader):
        raise UsageError(
            f"{where}: a DataLoader with sampler={shown(loader.sampler)}; a run draws the order of its examples from "
            f"its own seed: {remedy}"
        )
    if type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate:
        return split_of(loader.dataset, where)
    workers = {name: getattr(loader, name) for name in KEPT} if loader.num_workers else None
    return ItemSplit(loader.dataset, loader.collate_fn, where, workers)


def is_default(loader: "DataLoader[Any]") -> bool:
    """Whether a DataLoader is torch's own over a TensorDataset, in order or shuffled, and no argument says more.

    Its batches are then the rows of tensors, and reading these is the same.
    """
    return (
        type(loader) is DataLoader
        and type(loader.dataset) is TensorDataset
        and len(loader.dataset.tensors) > 1
        and loader.batch_size is not None
        and type(loader.batch_sampler) is BatchSampler
        and only_shuffles(loader)
        and loader.collate_fn is default_collate
        and not any(getattr(loader, name) for name in (*LOST, *KEPT))
    )


def only_shuffles(loader: "DataLoader[Any]") -> bool:
    """Whether the sampler gives every example once, in order or shuffled by no generator of its own."""
    sampler: Any = loader.sampler
    own = type(sampler) is RandomSampler and (sampler.replacement or sampler.generator is not None)
    shuffles = type(sampler) in (RandomSampler, SequentialSampler) and not own
    return shuffles and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]


def refuse_without_length(items: Any, where: str) -> None:
    """Raise UsageError for a Dataset that does not say how many items it has."""
    try:
        len(items)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{where} is {shown(items)}, which has no length: give {FORMS}, with __len__ and __getitem__"
        ) from error


def is_hugging_face(value: Any) -> bool:
    """Whether a value is a dataset of Hugging Face's `datasets`, which is not imported for it."""
    return type(value).__module__.partition(".")[0] == "datasets" and hasattr(value, "column_names")


def of_numbers(value: Any, where: str) -> Any:
    """A Hugging Face dataset in the format that it was given, or else one of tensors.

    Raises UsageError for one that is a stream, or has columns of text.
    """
    refuse_without_length(value, where)
    if value.format["type"] is not None:  # by set_transform, set_format and their kin
        return value
    columns = value.format["columns"]
    dtypes = {name: getattr(value.features[name], "dtype", None) for name in columns}
    texts = [name for name, dtype in dtypes.items() if dtype in ("string", "large_string")]
    if texts:
        raise UsageError(
            f"{where}: column {texts[0]!r} holds text: tokenize it, and drop it with .remove_columns({texts!r})"
        )
    return value.with_format("torch", columns=columns)


def form(value: Any, *, whole: bool = False) -> str:
    """A batch's shapes and types as text: of one example, or of the `whole`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {form(part, whole=whole)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(form(part, whole=whole) for part in value) + ")"
    if not isinstance(value, Tensor):
        return shown(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape[0 if whole else 1 :])}"


def digest_of(split: RowReader) -> str:
    """Sixteen characters that differ for splits that differ, as `UserData.digest` says."""
    digest = sha256(f"{len(split)}".encode())
    stored = isinstance(split, TensorSplit) or (isinstance(split, Split) and isinstance(split.x, Tensor))
    rows: slice | Tensor = slice(None) if stored else torch.arange(len(split))[:: max(1, len(split) // SAMPLED)]
    add_to_digest(digest, split.read(rows))
    return digest.hexdigest()[:16]


def add_to_digest(digest: Any, values: Any) -> None:
    """Add tensors, and the text of other objects, in nested tuples, lists and dicts, to a digest."""
    for leaf in tree_flatten(values)[0]:
        digest.update(text_of(leaf).encode())


def text_of(value: Any) -> str:
    """The hash of a tensor or an array, else what a value says of itself, without addresses."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = as_tensor(value, "an array")
    if isinstance(value, Tensor) and not value.is_meta and not value.is_nested:
        return hash_of(value if value.layout == torch.strided else value.to_dense())
    return ADDRESS.sub("", repr(value))
