"""Study 4, the lecture: its tables on processes; synchronous, stale and local SGD over links. See rules.md.

What is timed, and the page's parts, are in lecture_parts/.
"""

from functools import partial
from typing import Any

import torch
from harness import Cell, Study, held_out, measured_training, shuffled
from harness.examples import mnist, stages_of
from lecture_parts.launches import LAUNCHES, SYNCS, WIDTH
from lecture_parts.page import clock
from torch.nn.functional import cross_entropy

import stretto
from stretto.models.mlp import mlp

RATES = (0.01, 0.03, 0.1, 0.3)
STEPS, HORIZON, EVERY, BATCH, TESTED = 624, 400, 24, 64, 10_000  # multiples of local SGD's 8, the first rung, too


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run: two replicas, emulated, each with half of every minibatch."""
    data = mnist(path, TESTED)
    trainer = stretto.Trainer(
        stages_of(mlp(data, width=WIDTH), 1, seed), cross_entropy, partial(torch.optim.SGD, lr=rate), cell.method,
        mesh=stretto.Mesh(data=2), sync=cell.settings["sync"], device="cpu", seed=seed,
    )  # fmt: skip
    minibatch = shuffled(data.train, BATCH, seed)
    return measured_training(trainer, minibatch, steps, EVERY, held_out(data, TESTED, 1000))


def cells() -> tuple[Cell, ...]:
    """Three ways in which two replicas agree."""
    reference = next(iter(SYNCS))
    return tuple(
        Cell(name, "backprop", "SGD", RATES, STEPS, {"sync": sync}, reference=None if name == reference else reference)
        for name, sync in SYNCS.items()
    )


STUDY = Study(
    name="lecture",
    title="The lecture: its tables on processes, and three ways to agree over narrow links",
    question=(
        "What do the lecture's tables come to on one, two and four processes of this machine, and how soon do "
        "synchronous, bounded-stale and local SGD reach the same test error over links of 20, 100 and 400 Mbit/s?"
    ),
    cells=cells(),
    train=train,
    horizon=HORIZON,
    metric="error",
    baseline="all-reduce",
    answer=(
        "**Over narrow links local SGD wins.** At the test error that every seed of all-reduce has by step 360 it is "
        "3.3 times as soon over 400 Mbit/s [1.9, 5.8], 5.4 over 100 [3.1, 9.2], 6.7 over 20 [3.9, 11]; over loopback "
        "they cannot be told apart, and by steps nowhere. The parameter server is later everywhere, by a factor of "
        "2.3 to 2.4: its two replicas send gradients and take back weights, one after the other; its steps, 1.37 "
        "times all-reduce's by the mean, are not told from them.",
        "**Two processes are slower than one with two threads** in spatial parallelism: a step of AlexNet takes 569 "
        "ms on two slabs, 318 ms in one process with both cores, 531 with one, which is not told from two slabs. "
        "Bytes of data and operator parallelism are those of the formulas, to the byte. Steps are predicted with a "
        "mean error of 14 % over batches of 1 to 256, at most 45 %; the machine's own times vary so much that only "
        "one of the 18 errors, that of the MLP's single examples, is told from 0. A batch of 64 has 78 % of the "
        "utilisation of 256 (MLP), batches of 8 to 128 have 86 to 101 % (CNN).",
    ),
    setting=(
        "Cells: the MLP of 8 layers of 256 on the first 10,000 training images of MNIST, two replicas with half of "
        "each minibatch of 64, SGD without momentum at a constant rate, 624 steps; the cut-off is the "
        "error on all 10,000 test images that every seed of all-reduce has reached by step 360: "
        "[rules](../../rules.md), study 4. Timed parts: processes of one thread each, pinned to cores in turn, gloo, "
        "figures of three launches of each configuration, in turns. Evaluated every 24 steps, when the replicas of "
        "local SGD have just been merged. Two equal replicas take turns at the parameter server, so that gradients are "
        "at most one update old: the bound of 4 is never reached, and the row is asynchronous SGD with a delay of one."
    ),
    launches=LAUNCHES,
    clock=clock,
    tried=(
        "A pilot before the first run: three steps of most launches, and of each cell, on a loaded machine. It showed "
        "that they run; its times and losses are not kept.",
        "Rules left open, and read so: SGD has no momentum (study 3 names it where it has); batches of 64 are those of "
        "both replicas together; runs go on to 624 steps, so that ratios are known up to 1.73; the spatial batch is 16 "
        "and its network AlexNet with 1000 classes, four processes as 2 x 2 since its last images have two rows; the "
        "batches from which steps are predicted are 16 and 64; what is timed has random images of MNIST's shape.",
    ),
)
