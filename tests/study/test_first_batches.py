"""Batches of other sizes than a traced model takes are told before the first run, from few examples."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import stretto
from stretto import UsageError
from stretto.data.dataset import forever
from stretto.data.user_data import split_of

STUDY = {"methods": ("backprop", "gpipe"), "jobs": 1, "seeds": 1}
FEW = {"steps": 2, "batch_size": 4, "stages": 2, "quiet": True, "lr": 0.1}


class Texts(Dataset):
    """Token sequences; those with a number in `longer` have 6 tokens, all others 5. `read` are the numbers read."""

    def __init__(self, length, longer=()):
        self.length, self.longer, self.read = length, set(longer), []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((6 if index in self.longer else 5,), index % 7), index % 3


class Branches(nn.Module):
    """A forward that decides by a size, so that only torch.export can follow it."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.embed(x) if x.shape[1] > 3 else self.embed(x).relu()
        return self.out(self.hidden(x).mean(1))


def padded(items):
    return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


def loader(texts):
    return DataLoader(texts, batch_size=4, collate_fn=padded)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "call",
    [stretto.train, pytest.param(partial(stretto.compare, **STUDY), marks=pytest.mark.slow)],
    ids=["train", "compare"],
)
def test_a_longer_training_batch_is_refused_before_anything_is_written(call):
    def data():
        return loader(Texts(24, longer=range(4, 24))), loader(Texts(8))

    with pytest.raises(UsageError, match=r"batch \d of train: x is \[4, 6\], .* for \[any, 5\]: pad or crop"):
        call(Branches, data, out="out", **FEW)
    assert list(Path().iterdir()) == []


def test_a_longer_validation_batch_is_refused_and_few_items_are_read():
    training = Texts(10_000)

    def data():
        return loader(training), loader(Texts(8, longer=[7]))

    with pytest.raises(UsageError, match=r"batch 0 of validation: x is \[8, 6\]"):
        stretto.compare(Branches, data, out="study", **STUDY, **FEW)
    assert len(training.read) < 500


def test_a_model_that_takes_any_size_trains():
    class AnySize(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(7, 4), nn.Linear(4, 4), Mean(), nn.Linear(4, 3))

    run = stretto.train(AnySize, lambda: (loader(Texts(24, range(4, 24))), loader(Texts(8))), out="run", **FEW)
    assert run["steps"] == 2


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x):
        return x.mean(1)


def test_the_first_batches_are_those_of_the_run():
    split = split_of(loader(Texts(20)), "train")
    ahead = list(split.first_training_batches(4, 3, 2))
    assert len(ahead) == 2
    for (x, y), (trained, target), _ in zip(ahead, forever(split, 4, 3), range(2), strict=False):
        assert torch.equal(x, trained)
        assert torch.equal(y, target)
