"""Scripts that train replicas on a parameter server, and know nothing of processes."""

import contextlib
import os
import random
import time

import torch
from torch import nn

import stretto
from runtime import replicated
from runtime.scripts import weights_of
from stretto.stage import Stage


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
