"""Scripts that train replicas of a pipeline, and know nothing of processes."""

import os

import torch
from torch import nn

import stretto
from runtime.scripts import gone_on, saved_half_way, weights_of


def stages(number=4, width=8, norm=False):
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(3 + (2 * rank >= size > 1))  # the other replica's processes begin with other weights
    hidden = [
        nn.Sequential(nn.Linear(width, width), *[nn.BatchNorm1d(width)] * norm, nn.Tanh(), nn.Dropout(0.1 * norm))
        for _ in range(number - 1)
    ]
    return [each.double() for each in (*hidden, nn.Linear(width, 4))]


def batches(number, size=14, width=8, ignored=0):
    """`ignored`: so many targets of each batch count for nothing, the first ones."""
    generator = torch.Generator().manual_seed(7)
    made = [
        (torch.randn(size, width, generator=generator).double(), torch.randint(4, (size,), generator=generator))
        for _ in range(number)
    ]
    for _, y in made:
        y[:ignored] = -100
    return made


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "muon": lambda params, labels: stretto.optim.muon(params, lr=0.02, labels=labels),
}


def build(method, mesh=None, *, norm=False, number=4, optimizer="sgd", **options):
    return stretto.Trainer(
        stages(number, norm=norm),
        nn.functional.cross_entropy,
        OPTIMIZERS[optimizer],
        method,
        example=batches(1)[0][0],
        mesh=mesh,
        **options,
    )


def train(method, mesh=None, *, steps=9, ignored=0, **options):
    """Losses, weights and evaluation of a run that flushes in its middle; the last minibatch is short."""
    trainer = build(method, mesh, **options)
    data = [*batches(steps - 1, ignored=ignored), *batches(1, size=13, ignored=ignored)]
    losses = []
    for n, (x, y) in enumerate(data):
        losses.append(trainer.step(x, y))
        if n == 5:
            losses += trainer.flush()
    losses += trainer.flush()
    return losses, weights_of(trainer), trainer.evaluate(iter(data[:3]))


def train_all(runs):
    """What `train` gives for each of several (method, mesh, options), in the same processes."""
    return [train(method, mesh, **options) for method, mesh, options in runs]


def train_in_place(methods):
    """What `train` gives if each gradient is summed where it is, as large ones are."""
    from stretto.runtime import replica_group

    former, replica_group.LARGE = replica_group.LARGE, 0
    try:
        return [train(method, stretto.Mesh(data=2)) for method in methods]
    finally:
        replica_group.LARGE = former


def sums(count):
    """Gradients of all sizes, dtypes and strides, of one replica of `count`, and their sums."""
    from stretto.replicas import AllReduce
    from stretto.runtime.replica_group import GroupPeers

    trainer = build("backprop", stretto.Mesh(data=count))
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(rank)
    shapes = [(600, 700), (3,), (), (40, 10, 30, 30), (512, 512), (5, 5)]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    if rank:
        gradients[3] = gradients[3].to(memory_format=torch.channels_last)
    gradients[4] = gradients[4].double()
    addends = [gradient.clone() for gradient in gradients]
    GroupPeers(trainer.backend._replica_group, AllReduce()).add_up_gradients(gradients, lambda: None)
    return addends, gradients


def save_in_the_middle(method, mesh, folder, **options):
    return saved_half_way(build(method, mesh, **options), batches(4), folder)


def resume(method, mesh, folder, **options):
    return gone_on(build(method, mesh, **options), batches(4), folder)


def predicted(sync, data):
    """Outputs after some steps of replicas."""
    trainer = build("1f1b", stretto.Mesh(data=data), sync=sync)
    for x, y in batches(3):
        trainer.step(x, y)
    return trainer.predict(x for x, _ in batches(2))
