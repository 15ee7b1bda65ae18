"""Study 12, labels: do local losses fit random labels, where there are more than one layer can hold? See rules.md."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Cell, Claim, Study, held_out, measured_training, shuffled
from harness.examples import mnist
from torch.nn.functional import avg_pool2d, cross_entropy

import stretto
from stretto.data import Dataset, Split
from stretto.data.table import randomised
from stretto.models import build

WIDTH, LAYERS, BATCH, STEPS, FIRST, EVERY = 64, 8, 64, 10_000, 2500, 500
LABELS, POOLED = 3000, 4  # images; pixels a side that become one
RATES = (0.0005, 0.001, 0.002, 0.004)
METHODS = {
    "backprop": ("backprop", LAYERS),
    "one layer": ("backprop", 1),
    "2 chunks": ("chunked(chunks=2)", LAYERS),
    "greedy": ("greedy", LAYERS),
}


def memorised(path: str | None) -> Dataset:
    """The first images, pooled to 7 x 7, with labels drawn anew; they are tested and choose rates, too."""
    drawn = randomised(mnist(path, 1000), True)
    x, y = drawn.train.first(LABELS)
    x = avg_pool2d(x, POOLED)
    split = Split((x - x.mean()) / x.std(), y)
    return replace(drawn, train=split, validation=split, test=split)


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run; loss and error are those of the training images."""
    data = memorised(path)
    batch = shuffled(data.train, BATCH, seed)
    trainer = stretto.Trainer(
        build("mlp", data, seed=seed, depth=cell.settings["layers"], width=WIDTH).layers, cross_entropy,
        partial(torch.optim.AdamW, lr=rate), cell.method, example=batch(0)[0], device="cpu", seed=seed,
    )  # fmt: skip
    return measured_training(trainer, batch, steps, EVERY, held_out(data, LABELS))


def cells() -> tuple[Cell, ...]:
    """Backprop, one hidden layer of the same width, two chunks, greedy."""
    return tuple(
        Cell(
            name, method, "AdamW", RATES, STEPS, {"layers": layers, "stages": layers},
            reference=None if name == "backprop" else "backprop", seeds=(0, 1, 2, 3, 4), first=FIRST,
        )
        for name, (method, layers) in METHODS.items()
    )  # fmt: skip


STUDY = Study(
    name="labels",
    title="Random labels that one layer cannot hold",
    question="Do local losses memorise random labels as backprop does, where one layer alone cannot?",
    cells=cells(),
    train=train,
    horizon=STEPS,
    metric="error",
    baseline="backprop",
    claims=(
        Claim("Local losses end at a training loss at most 3 % above backprop's", "gap", ("2 chunks", "greedy"), 3.0),
    ),
    setting=(
        "An MLP of 8 layers of 64, or of one, on the first 3,000 images of MNIST, pooled to 7 x 7, with labels drawn "
        "anew; AdamW in batches of 64, 10,000 steps; loss and error are those of the training images: "
        "[rules](../../rules.md), study 12. The data is a folder with MNIST's four files."
    ),
    tried=(
        "Pilots of one seed chose images and width so that one layer cannot hold the labels: images of 28 x 28 were "
        "not learnt by 8 layers in 8,000 steps, and as well by one.",
    ),
)
