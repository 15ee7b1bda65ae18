"""What one process refuses, all refuse; caught, they make a new Trainer and train as if nothing had been."""

import contextlib
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import stretto
from runtime import scripts
from stretto.errors import UsageError

REFUSALS = (
    "method", "method of one", "differs", "step of one", "evaluate", "load", "load of one", "stage", "own",
)  # fmt: skip


class Picky(nn.Module):
    """A stage that refuses its fourth pass."""

    def __init__(self):
        super().__init__()
        self.linear, self.passes = nn.Linear(8, 8), 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 4:
            raise UsageError(f"no more than 3 passes of {tuple(x.shape)}")
        return self.linear(x)


def refuse(kind, folder):
    """Do something that is refused, on all processes or on the last one only."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    last = rank == size - 1
    if kind in ("method", "method of one"):
        scripts.build("pbb" if last or kind == "method" else "pb")
    if kind == "differs":
        scripts.build("1f1b" if last else "pb")
    if kind == "own":
        with scripts.build("pb").backend.abort_all_on_error():
            if last:
                raise UsageError(f"rank {rank} has its own rules")
            dist.barrier()
    if kind == "stage":
        made = [nn.Linear(8, 8), nn.Linear(8, 8), Picky(), nn.Linear(8, 4)]
        optimizer = scripts.OPTIMIZERS["sgd"]
        trainer = stretto.Trainer(made, nn.functional.cross_entropy, optimizer, "pb", example=scripts.batches(1)[0][0])
        for x, y in scripts.batches(6):  # workers 0 and 1 are through before it fails
            trainer.step(x, y)
    trainer = scripts.build("pb")
    x, y = scripts.batches(1)[0]
    if kind == "step of one":
        trainer.step(x, y)
        trainer.step(x, None if last else y)
        trainer.flush()
    if kind == "evaluate":
        trainer.evaluate([])
    if kind == "load":
        trainer.load(Path(folder) / "nowhere")
    if kind == "load of one":
        trainer.save(Path(folder) / "saved")
        trainer.load(Path(folder) / ("nowhere" if last else "saved"))


def threads_after(kind, folder):
    """How many threads of groups are left by a refusal that was caught."""
    before = threads_of_groups()
    with contextlib.suppress(stretto.StrettoError):
        refuse(kind, folder)
    gc.collect()
    return threads_of_groups() - before


def threads_of_groups():
    return [(each / "comm").read_text() for each in Path("/proc/self/task").iterdir()].count("gloo_tcp_loop\n")


def go(kinds, folder):
    """For each kind: the error, what the former trainer says, and what a new one comes to."""
    torch.set_num_threads(1)
    told = []
    former = scripts.build("1f1b") if "RANK" in os.environ else None
    for kind in kinds:
        try:
            refuse(kind, folder)
            told.append("nothing was refused")
        except stretto.StrettoError as error:
            told.append((type(error).__name__, str(error), error.said_by, error.__notes__))
        try:
            former.step(*scripts.batches(1)[0])
        except stretto.StrettoError as error:
            told.append(str(error))
        former = scripts.build("1f1b")
    return told, scripts.train("pb", steps=8, flush_at=3)
