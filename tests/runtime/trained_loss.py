"""A loss with parameters, and a pipeline that trains it; the script knows nothing of processes."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import stretto

STEPS = 4


class Weighted(nn.Module):
    """A loss whose uncertainty is learned."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.centers = nn.Parameter(torch.zeros(3))

    def forward(self, output, target):
        return torch.exp(-self.scale) * mse_loss(output + self.centers, target) + self.scale


def stages(dtype=torch.float64):
    torch.manual_seed(0)
    parts = nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))
    return [part.to(dtype) for part in parts]


def sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def batch(step, dtype=torch.float64):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, generator=draw).to(dtype), torch.randn(12, 3, generator=draw).to(dtype) * 9


def train(data=1):
    trainer = stretto.Trainer(stages(), Weighted().double(), sgd, "1f1b(microbatches=3)", mesh=stretto.Mesh(data=data))
    losses = [trainer.step(*batch(step)) for step in range(STEPS)]
    return losses, trainer.gather(), trainer.evaluate([batch(9)])["loss"]
