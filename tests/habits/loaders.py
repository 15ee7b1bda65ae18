"""Loaders as people write them, of the same rows: a plain loop over one sees what `fit` has to train on."""

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data import default_collate as collate

from habits.networks import batches

LOADERS = (
    "a list of batches", "a loader in order, whose last batch is small", "a loader that shuffles by its generator",
    "a sampler with weights", "a batch sampler of unequal batches", "a collate function of its own",
    "a dataset that is iterated", "a dataset of whole batches", "the small last batch left out",
    "a class with __iter__",
)  # fmt: skip
NUMBER = 3  # batches' worth of rows


class Rows(Dataset):
    """Rows of inputs and their targets."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class Iterated(IterableDataset):
    """The same rows, one after the other."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __iter__(self):
        return iter(self.pairs)


class Unequal:
    """Lists of 5, 7 and 4 rows' numbers."""

    def __iter__(self):
        return iter([[3, 1, 4, 0, 5], [9, 2, 6, 8, 7, 10, 11], [12, 15, 14, 13]])

    def __len__(self):
        return 3


class Again:
    """Batches, anew each time that it is iterated."""

    def __init__(self, given):
        self.given = given

    def __iter__(self):
        return iter(self.given)


def upside_down(rows):
    """The default's batch with its rows in the other order."""
    return collate(rows[::-1])


def rows_of(given):
    """(x, y) for each row; x is a tensor, a tuple or a dict as it was."""
    found = []
    for x, y in given:
        for row in range(len(y)):
            if isinstance(x, dict):
                part = {key: value[row] for key, value in x.items()}
            else:
                part = tuple(value[row] for value in x) if isinstance(x, tuple) else x[row]
            found.append((part, y[row]))
    return found


def loader(kind, habits):
    """A loader of that kind; equal for equal habits."""
    given = batches(habits, NUMBER)
    rows = Rows(rows_of(given))
    drawn = torch.Generator().manual_seed(7)
    made = {
        "a list of batches": lambda: given,
        "a loader in order, whose last batch is small": lambda: DataLoader(rows, batch_size=8),
        "a loader that shuffles by its generator": lambda: DataLoader(rows, 9, shuffle=True, generator=drawn),
        "a sampler with weights": lambda: DataLoader(
            rows, 6, sampler=WeightedRandomSampler([1.0 + n % 3 for n in range(len(rows))], 24, generator=drawn)
        ),
        "a batch sampler of unequal batches": lambda: DataLoader(rows, batch_sampler=Unequal()),
        "a collate function of its own": lambda: DataLoader(rows, 6, collate_fn=upside_down),
        "a dataset that is iterated": lambda: DataLoader(Iterated(rows.pairs), batch_size=7),
        "a dataset of whole batches": lambda: DataLoader(Rows(given), batch_size=None),
        "the small last batch left out": lambda: DataLoader(
            rows, batch_sampler=BatchSampler(SequentialSampler(rows), 10, drop_last=True)
        ),
        "a class with __iter__": lambda: Again(given),
    }
    return made[kind]()
