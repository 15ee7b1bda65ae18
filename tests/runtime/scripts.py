"""Training scripts that know nothing of processes."""

import torch
from torch import nn

import stretto


def stages(number, width=8):
    torch.manual_seed(3)
    made = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(number - 1)]
    return [*made, nn.Linear(width, 4)]


def batches(number, size=8, width=8):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, width, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(number)
    ]


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def nadam(params):
    return torch.optim.NAdam(params, lr=0.01)


def train(method, num_stages, steps=12, flush_at=7, **options):
    """Losses, weights and evaluation of a run that flushes in its middle."""
    optimizer = nadam if method.startswith("nesterov") else sgd
    data = batches(steps)
    trainer = stretto.Trainer(
        stages(num_stages), nn.functional.cross_entropy, optimizer, method, example=data[0][0], **options
    )
    losses = []
    for n, (x, y) in enumerate(data):
        losses.append(trainer.step(x, y))
        if n == flush_at:
            losses.append(trainer.flush())
    losses.append(trainer.flush())
    evaluated = trainer.evaluate(data[:3])
    gathered = trainer.gather()
    weights = None if gathered is None else {key: value.clone() for key, value in gathered.items()}
    return losses, weights, evaluated
