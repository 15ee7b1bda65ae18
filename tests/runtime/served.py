"""Scripts that train replicas on a parameter server, and know nothing of processes."""

import contextlib
import os
import random
import threading
import time

import torch
from torch import nn

import stretto
from runtime import replicated
from runtime.scripts import weights_of
from stretto.stage.stage import Stage


def train(method, replicas, *, order=None, staleness=4, steps=14, slow=None, **options):
    """Losses, weights, evaluation and order of a run that flushes in its middle."""
    sync = stretto.ParameterServer(staleness=staleness, order=order)
    trainer = replicated.build(method, stretto.Mesh(data=replicas), sync=sync, **options)
    losses = []
    with slowed(slow) if slow is not None else contextlib.nullcontext():
        for n, (x, y) in enumerate(replicated.batches(steps)):
            losses.append(trainer.step(x, y))
            if n == steps // 2:
                losses += trainer.flush()
        losses += trainer.flush()
    weights = weights_of(trainer)
    evaluated = trainer.evaluate(iter(replicated.batches(3)))
    return losses, weights, evaluated, trainer.order()


def train_all(runs):
    """What `train` gives for each of several (method, replicas, options), in the same processes."""
    return [train(method, replicas, **options) for method, replicas, options in runs]


def many(updates, staleness):
    """The order of so many updates of a tiny model by replicas of which some are slow for a while, and their threads.

    A pause is the longer the higher the rank; it is drawn for each stretch of 50 steps whether there are any.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    trainer = stretto.Trainer(
        [nn.Linear(2, 1)], nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.01),
        mesh=stretto.Mesh(data=size), sync=stretto.ParameterServer(staleness=staleness),
    )  # fmt: skip
    draw, slow = random.Random(rank), False
    x, y = torch.randn(size, 2), torch.randn(size, 1)
    for n in range(-(-updates // size)):
        if n % 50 == 0:
            slow = draw.random() < 0.3
        if slow and draw.random() < 0.2:
            time.sleep(draw.random() * 0.001 * rank)
        if n == 100 and rank == size - 1:
            time.sleep(1)  # long enough for the others to come to the bound, on any machine
        trainer.step(x, y)
    trainer.flush()
    listening = [thread.name for thread in threading.enumerate() if "server" in thread.name]
    return trainer.order(), listening


def all_of_three(runs, updates, staleness):
    """`train_all` and `many`, in the same processes."""
    return train_all(runs), many(updates, staleness)


def all_of_four(runs, folder):
    """`train_all`, and a run that is saved in its middle."""
    sync = stretto.ParameterServer(staleness=1)
    told = train_all(runs)
    return told, replicated.save_in_the_middle("pb", stretto.Mesh(data=2), folder, sync=sync)


@contextlib.contextmanager
def slowed(seed):
    """Actions take a random time longer, in each process another one, in some much longer."""
    rank = int(os.environ.get("RANK", 0))
    draw, former = random.Random(f"{seed} {rank}"), Stage.run

    def late(*args, **kwargs):
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.002 * (1 + rank % 3))
        return former(*args, **kwargs)

    Stage.run = late
    try:
        yield
    finally:
        Stage.run = former
