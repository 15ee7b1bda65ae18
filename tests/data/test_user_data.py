"""The user's own data in every form, against the tensors that they were made of."""

import random
from multiprocessing import current_process

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from stretto import UsageError
from stretto.data import forever
from stretto.data.user_data import user_data

X = torch.arange(30.0).view(10, 3)
Y = torch.arange(10) % 3


class Items:
    """A map-style Dataset, as pairs."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index >= 10:
            raise IndexError(index)
        return X[index], int(Y[index])


class Drawing(Items):
    """A Dataset whose items are changed at random, by three generators."""

    def __getitem__(self, index):
        return X[index] + torch.rand(1) + random.random() + float(np.random.rand()), int(Y[index])


class Dicts(Items):
    def __getitem__(self, index):
        return {"ids": X[index], "mask": X[index] > 3, "labels": Y[index]}


def splits(value):
    return user_data((value, (X, Y)), "mine")


def rows_of(split, seed=3):
    return list(split.batches(4, seed=seed))


@pytest.mark.parametrize(
    "value",
    [
        (X.numpy(), Y.numpy()),
        [X, Y],
        TensorDataset(X, Y),
        Items(),
        Subset(Items(), range(10)),
        DataLoader(TensorDataset(X, Y), batch_size=5),
        DataLoader(Items(), batch_size=5, shuffle=True),
        DataLoader(Items(), num_workers=2),
    ],
    ids=["arrays", "list", "tensors", "items", "subset", "loader", "shuffling", "workers"],
)
def test_every_form_gives_the_same_batches(value):
    for (x, y), (x_given, y_given) in zip(rows_of(splits(value).train), rows_of(splits((X, Y)).train), strict=True):
        assert torch.equal(x, x_given)
        assert torch.equal(y, y_given)


def test_several_inputs_by_place_and_by_name():
    pairs = {"by place": ((X, X * 2), Y), "by name": ({"a": X, "b": X * 2}, Y)}
    for value in pairs.values():
        (x, y), *_ = rows_of(splits(value).train)
        parts = list(x.values()) if isinstance(x, dict) else list(x)
        assert torch.equal(parts[0] * 2, parts[1])
        assert len(parts[0]) == len(y) == 4
    x, y = splits(Dicts()).train.first(2)
    assert list(x) == ["ids", "mask"]
    assert torch.equal(y, Y[:2])
    x, _ = splits(TensorDataset(X, X * 2, Y)).train.first(2)
    assert torch.equal(x[1], X[:2] * 2)


@pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_items_draw_depends_on_the_seed_and_the_batch_alone(workers):
    split = splits(DataLoader(Drawing(), num_workers=workers)).train
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    start = 2 if workers == 1 else 4  # in the second or the third epoch, each of which starts its workers
    whole = list(zip(range(start + 2), forever(split, 4, seed=1), strict=False))
    later = list(zip(range(start, start + 2), forever(split, 4, seed=1, start=start), strict=False))
    for (_, (x, _)), (_, (x_later, _)) in zip(whole[start:], later, strict=True):
        assert torch.equal(x, x_later)
    assert not torch.equal(whole[0][1][0], whole[2][1][0])
    if not workers:
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        assert before[2] == np.random.get_state()[1].tolist()
    alone = splits(Drawing()).train
    assert torch.equal(next(iter(forever(alone, 4, seed=1)))[0], whole[0][1][0]), "workers change no number"


def test_evaluation_sees_the_same_examples_each_time():
    split = splits(Drawing()).train
    first, second = ([x for x, _ in split.batches(4)] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_digest_tells_data_apart():
    digest = user_data(((X, Y), (X, Y)), "mine").digest
    assert digest == user_data(((X.clone(), Y.clone()), TensorDataset(X, Y)), "mine").digest
    changed = X.clone()
    changed[9, 2] += 1
    others = [((changed, Y), (X, Y)), ((X, Y), (changed, Y)), ((X, Y), (X, Y), (X, Y)), ((X.double(), Y), (X, Y))]
    assert len({digest, *(user_data(other, "mine").digest for other in others)}) == 5


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"ids": X.tolist(), "labels": Y.tolist()})
    x, y = splits(table).train.first(3)
    assert torch.equal(x, X[:3])
    assert torch.equal(y, Y[:3])
    data = user_data(datasets.DatasetDict({"train": table, "validation": table, "test": table}), "mine")
    assert len(data.test) == 10
    with pytest.raises(UsageError, match="column 'text' holds text"):
        splits(datasets.Dataset.from_dict({"text": ["a", "b"], "labels": [0, 1]}))
    with pytest.raises(UsageError, match="no length"):
        splits(table.to_iterable_dataset())


def test_a_hugging_face_dataset_keeps_its_format():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"ids": X.tolist(), "more": X.tolist(), "labels": Y.tolist()})

    def doubled(batch):
        return {"x": [2 * torch.tensor(ids) for ids in batch["ids"]], "labels": batch["labels"]}

    for value, wanted in (
        (table.with_transform(doubled), 2 * X),
        (table.with_format("torch", columns=["ids", "labels"]), X),
        (table.with_format("numpy", columns=["ids", "labels"], dtype=np.float64), X.double()),
        (table.with_format(None, columns=["ids", "labels"]), X),
    ):
        x, y = splits(value).train.read(torch.tensor([4, 2]))
        assert x.dtype == wanted.dtype
        assert torch.equal(x, wanted[[4, 2]])
        assert y.tolist() == [1, 2]


def test_a_loader_gives_its_batch_size_and_built_in_networks_take_classes():
    data = splits(DataLoader(TensorDataset(X, Y), batch_size=5))
    assert data.batch_size == 5
    assert data.for_networks().num_classes == 3
    assert data.for_networks().task == "classification"
    tokens = torch.arange(20).view(5, 4)
    assert user_data(((tokens, tokens + 1), (tokens, tokens)), "mine").for_networks().num_classes == 21
    for other in ((X, X), (X, Y - 5), Items(), ({"a": X}, Y)):
        assert splits(other).for_networks() is None


class Doubled(TensorDataset):
    """A TensorDataset whose items are not those of its tensors."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return 2 * x, y


class AtOnce(Items):
    def __getitems__(self, indices):
        return [(2 * X[index], int(Y[index])) for index in indices]


def test_items_are_read_as_a_loader_reads_them():
    for dataset in (Doubled(X, Y), AtOnce()):
        for value in (dataset, DataLoader(dataset, 5), Subset(dataset, range(10))):
            assert torch.equal(splits(value).train.read(torch.tensor([4, 2]))[0], 2 * X[[4, 2]])


def test_a_process_that_may_start_no_others_reads_by_itself(monkeypatch):
    split = splits(DataLoader(Drawing(), num_workers=2, timeout=9, prefetch_factor=3, pin_memory=True)).train
    monkeypatch.setitem(current_process()._config, "daemon", True)
    alone = splits(DataLoader(Drawing())).train
    for (x, _), (other, _) in zip(rows_of(split), rows_of(alone), strict=True):
        assert torch.equal(x, other)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], Y[0])])


class Own(DataLoader):
    """A loader of one's own."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((X, Y[:9]), "of unequal lengths"),
        (({"a": X, "b": X[:4]}, Y), "of unequal lengths"),
        ((X, None), "mine: train"),
        ("text", "mine: train is 'text'"),
        (X, "mine: train is Tensor"),
        (7, "mine: train is 7"),
        (Stream(), "which has no length"),
        (DataLoader(Stream()), "has no length and no rows"),
        (DataLoader(Items(), sampler=WeightedRandomSampler([1.0] * 10, 10)), "sampler="),
        (DataLoader(Items(), sampler=RandomSampler(Items(), replacement=True)), "sampler="),
        (DataLoader(Items(), sampler=RandomSampler(Items(), num_samples=4)), "sampler="),
        (DataLoader(Items(), batch_sampler=[[0, 1], [2, 3]]), "batch_sampler="),
        (DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(Items()), 5, False)), "batch_sampler="),
        (DataLoader(Items(), sampler=RandomSampler(range(4))), "sampler="),
        (DataLoader(Items(), sampler=RandomSampler(Items(), generator=torch.Generator())), "sampler="),
        (DataLoader(Items(), shuffle=True, generator=torch.Generator()), "a DataLoader with generator="),
        (DataLoader(Items(), num_workers=1, worker_init_fn=print), "a DataLoader with worker_init_fn="),
        (DataLoader(Items(), num_workers=1, persistent_workers=True), "a DataLoader with persistent_workers=True"),
        (DataLoader(Items(), batch_size=None), "batch_size=None, whose items are batches already"),
        (Own(Items()), "a Own, which may give other batches"),
        (TensorDataset(X), r"a TensorDataset of one tensor: a loss takes an output and a target, .*\(x, x\)"),
        (TensorDataset(X[:0], Y[:0]), "mine: train is empty"),
        (Subset(Items(), [99]), "raised IndexError"),
        ([1, 2, 3], "its items are"),
    ],
)
def test_what_is_no_data(value, message):
    with pytest.raises(UsageError, match=message):
        splits(value).train.first(2)


class Holey(Items):
    """A Dataset of one item that cannot be read, behind others."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {21: None}[index] if index > 20 else super().__getitem__(index % 10)


def test_an_item_that_cannot_be_read_is_named_with_its_line():
    with pytest.raises(UsageError, match=r"^mine: train: item 22 raised KeyError: 22 \(.*test_user_data\.py:\d+\)$"):
        splits(Holey()).train.read(torch.tensor([3, 1, 22, 7, 25]))


def test_items_that_are_no_examples():
    for items, message in (
        ([{"a": X[0]}] * 3, "give the target one of the names labels"),
        ([(X[0], Y[0], X[0]), (X[1], Y[1], X[0])], "its items are"),
    ):
        with pytest.raises(UsageError, match=message):
            splits(items).train.first(2)
    for value in (None, (X, Y), ((X, Y),), [(X, Y)] * 4, {"train": (X, Y)}):
        with pytest.raises(UsageError, match=r"return \(train, validation\)|give a pair"):
            user_data(value, "mine")


def test_a_sampler_that_only_shuffles_is_the_runs_order():
    assert splits(DataLoader(Items(), sampler=RandomSampler(Items()))).train.first(2)[0].shape == (2, 3)


def test_items_of_unequal_shapes_are_told_with_two_of_them():
    items = [(torch.zeros(3 + n % 2), n) for n in range(4)]
    with pytest.raises(UsageError, match=r"train: .*\(float32 \[3\], 0\) and \(float32 \[4\], 1\) cannot be made a b"):
        user_data((items, items), "own")

    def stacked(batch):
        return torch.stack([x for x, _ in batch]), torch.tensor([y for _, y in batch])

    loader = DataLoader(items, batch_size=2, collate_fn=stacked)
    with pytest.raises(UsageError, match=r"by the DataLoader's collate_fn: RuntimeError: .*test_user_data.py:\d+"):
        user_data((loader, loader), "own")
