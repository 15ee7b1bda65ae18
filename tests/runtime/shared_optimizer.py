"""Scripts that train replicas of which each keeps a share of the optimizer's state, and know nothing of processes."""

import torch
from torch import nn

import stretto
from runtime import replicated, sharded
from runtime.scripts import gone_on, saved_half_way, weights_of
from stretto.optim import LAMB, LARS

WIDTH = 24  # of layers with 576 weights, so that shares cut through them
STEPS = 6


def by_dimension(params):
    """As scripts do: biases do not decay."""
    groups = [
        {"params": [p for p in params if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays} for decays in (1, 0)
    ]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": by_dimension,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "lamb": lambda params: LAMB(params, lr=0.01, weight_decay=0.1),
    "lars": lambda params: LARS(params, lr=1.0, vectors=True),
}


def build(optimizer, method="1f1b(microbatches=2)", data=2, *, tensor=1, stages=2, tied=False, **options):
    """A Trainer of this many stages, which begin with other weights in each replica."""
    parts = replicated.stages(stages, WIDTH)
    if tied:
        parts[-1] = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 4)).double()
        parts[-1][0].weight = parts[0][0].weight
    options = {"sync": "shard-optimizer", **options}
    return stretto.Trainer(
        parts, nn.functional.cross_entropy, OPTIMIZERS[optimizer], method, mesh=stretto.Mesh(data=data, tensor=tensor),
        example=replicated.batches(1, width=WIDTH)[0][0], **options,
    )  # fmt: skip


def half(optimizer):
    """A scheduler that halves the rate every other update."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(optimizer, options):
    """Losses, weights, rates, norms and what `evaluate` says."""
    trainer = build(optimizer, **options)
    data = [*replicated.batches(STEPS - 1, width=WIDTH), *replicated.batches(1, size=13, width=WIDTH)]
    losses = [trainer.step(x, y) for x, y in data]
    losses += trainer.flush()
    norms = trainer.grad_norms()
    told = [loss for loss in losses if loss is not None]
    return told, weights_of(trainer), trainer.lr, norms, trainer.evaluate(data[:2])


def train_all(runs):
    """What `train` gives for each of several runs, in the same processes."""
    return [train(*run) for run in runs]


def save(folder, optimizer, options):
    """The weights of a run that saved in its middle."""
    return saved_half_way(build(optimizer, **options), replicated.batches(4, width=WIDTH), folder)


def resume(folder, optimizer, options):
    """The weights of a run that goes on from there."""
    return gone_on(build(optimizer, **options), replicated.batches(4, width=WIDTH), folder)


def everything(runs, folder, kept):
    """What the other scripts give, in the same processes."""
    return {
        "train": train_all(runs),
        "held": sharded.held("shard-optimizer"),
        "saved": {name: save(f"{folder}/{name}", *run) for name, run in kept.items()},
        "resumed": {name: resume(f"{folder}/emulated-{name}", *run) for name, run in kept.items()},
    }
