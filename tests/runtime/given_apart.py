"""Scripts whose processes are given different batches, or None for what they do not read."""

import os

import torch

from runtime import scripts
from stretto.errors import UsageError


def alike(method):
    """Losses and weights where each process passes only what it reads: x the first, y the last."""
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    trainer = scripts.build(method)
    losses = [trainer.step(x if not rank else None, y if rank == size - 1 else None) for x, y in scripts.batches(6)]
    return losses + trainer.flush(), trainer.gather()


def apart(where, since):
    """What is said where the last process's x or y is another one from step `since` on; the first passes no y."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = scripts.build("1f1b")
    for number, (x, y) in enumerate(scripts.batches(6)):
        if rank == size - 1 and number >= since:
            x, y = (x + 1, y) if where == "x" else (x, 1 - y)
        try:
            trainer.step(x, y if rank else None)
        except UsageError as error:
            return number, str(error)
    return None


def apart_each(kinds):
    torch.set_num_threads(1)
    return [apart(*kind) for kind in kinds], alike("pb")
