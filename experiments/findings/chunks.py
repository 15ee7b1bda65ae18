"""Study 7, chunks: local losses against backprop and against backprop with the same heads. See rules.md."""

from functools import partial
from typing import Any

import torch
from depth import SCHEDULE
from harness import Cell, Study, held_out, measured_training, shuffled
from harness.decoder import BATCH as TEXT_BATCH
from harness.decoder import WINDOWS, decoder, text
from harness.examples import mnist
from sections.chunk_tables import more
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto.data import Dataset
from stretto.losses import token_cross_entropy
from stretto.models import build
from stretto.models.resnet import ReluSum

STEPS, FIRST, EVERY = 2000, 500, 50
STAGES, DEPTH, IMAGE_BATCH, TESTED = 8, 20, 32, 1000
SEEDS = (0, 1, 2, 3, 4)
METHODS = {
    "backprop": "backprop",
    "2 chunks": "chunked(chunks=2)",
    "heads at 3, weight 1": "backprop(head_at=3)",
    "heads at 3, weight 0.3": "backprop(head_at=3, head_weight=0.3)",
    "4 chunks": "chunked(chunks=4)",
    "greedy": "greedy",
    "overlapping": "overlapping",
    "heads everywhere, weight 0.3": "backprop(head_weight=0.3)",
    "heads everywhere, weight 0.1": "backprop(head_weight=0.1)",
}
NETWORKS = {
    "decoder": ("AdamW", (0.001, 0.002, 0.004, 0.008), TEXT_BATCH),
    "ResNet-20": ("SGD", (0.01, 0.03, 0.1, 0.3), IMAGE_BATCH),
}


def resnet(data: Dataset, seed: int) -> list[nn.Module]:
    """ResNet-20 with group norms in eight stages, a residual block each; the first one has two, and the stem."""
    layers = build("cifar-resnet", data, seed=seed, depth=DEPTH, norm="group").layers
    ends = [n + 1 for n, layer in enumerate(layers) if isinstance(layer, ReluSum)]
    return stretto.split(layers, [0, *ends[1:-1], len(layers)])


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run."""
    on_text = cell.settings["network"] == "decoder"
    data = text(path) if on_text else mnist(path, TESTED, TESTED)
    batch = shuffled(data.train, cell.settings["batch"], seed)
    adamw = partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    trainer = stretto.Trainer(
        decoder(data, seed) if on_text else resnet(data, seed), token_cross_entropy if on_text else cross_entropy,
        adamw if on_text else partial(torch.optim.SGD, lr=rate, momentum=0.9), cell.method, example=batch(0)[0],
        device="cpu", seed=seed, scheduler=SCHEDULE, clip=1.0 if on_text else None,
    )  # fmt: skip
    held = held_out(data, WINDOWS) if on_text else held_out(data, TESTED, TESTED // 2)
    return measured_training(trainer, batch, steps, EVERY, held)


def cells() -> tuple[Cell, ...]:
    """Every method on both networks, each against the network's backprop."""
    return tuple(
        Cell(
            f"{network}, {name}", method, optimizer, rates, STEPS,
            {"network": network, "stages": STAGES, "batch": batch},
            reference=None if name == "backprop" else f"{network}, backprop", seeds=SEEDS, first=FIRST,
        )
        for network, (optimizer, rates, batch) in NETWORKS.items()
        for name, method in METHODS.items()
    )  # fmt: skip


ALL = cells()
STUDY = Study(
    name="chunks",
    title="Chunks with their control",
    question=(
        "What of the advantage of local losses is that of their auxiliary heads, which backprop can have, too? And who "
        "is first by steps, by serial compute, and by time?"
    ),
    cells=ALL,
    more=partial(more, ALL),
    train=train,
    horizon=STEPS,
    baseline="backprop",
    setting=(
        "A decoder of 8 blocks of width 64 on the bytes of PostgreSQL's manual and ResNet-20 with group norms on "
        "MNIST, both in 8 stages: [rules](../../rules.md), study 7. The data is a folder with MNIST's four files in "
        "`mnist` and the text in `text`."
    ),
    tried=("A pilot measured speed alone, of 12 steps each: about 0.1 s a step on both networks.",),
)
