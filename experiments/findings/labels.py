"""Study 12, labels: do local losses fit random labels, where there are more than one layer can hold? See rules.md."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Cell, Claim, Study, held_out, measured_training, shuffled
from harness.examples import mnist
from local_updates import SGD_RATES
from torch.nn.functional import cross_entropy

import stretto
from stretto.data.table import randomised
from stretto.models import build

WIDTH, LAYERS, BATCH, STEPS, FIRST, EVERY, HELD = 128, 8, 64, 6000, 1500, 250, 2000
METHODS = {
    "backprop": ("backprop", LAYERS),
    "one layer": ("backprop", 1),
    "2 chunks": ("chunked(chunks=2)", LAYERS),
    "greedy": ("greedy", LAYERS),
}


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run: 10,000 images with labels drawn anew; loss and error are those of training images."""
    drawn = randomised(mnist(path, 1000), True)
    data = replace(drawn, validation=drawn.train, test=drawn.train)
    batch = shuffled(data.train, BATCH, seed)
    trainer = stretto.Trainer(
        build("mlp", data, seed=seed, depth=cell.settings["layers"], width=WIDTH).layers, cross_entropy,
        partial(torch.optim.SGD, lr=rate, momentum=0.9), cell.method, example=batch(0)[0], device="cpu", seed=seed,
    )  # fmt: skip
    return measured_training(trainer, batch, steps, EVERY, held_out(data, HELD))


def cells() -> tuple[Cell, ...]:
    """Backprop, one hidden layer of the same width, two chunks, greedy."""
    return tuple(
        Cell(
            name, method, "SGD", SGD_RATES, STEPS, {"layers": layers, "stages": layers},
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
        "An MLP of 8 layers of 128, or of one, on 10,000 images of MNIST with labels drawn anew, SGD with momentum 0.9 "
        "in batches of 64, 6,000 steps; loss and error of the first 2,000 of these images: [rules](../../rules.md), study "
        "12. The data is a folder with MNIST's four files."
    ),
    tried=("A pilot measured speed alone, of 20 steps.",),
)
