"""A script whose last replica runs into something: python faulty_replicas.py KIND SYNC."""

import os
import sys

import torch
from torch import nn

import stretto

torch.set_num_threads(1)
KIND, RANK, SIZE = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 6 and RANK == SIZE - 1 and KIND != "optimizer":
            if KIND == "error":
                raise ValueError("bad luck")
            os.kill(os.getpid(), 9)
        return self.linear(x)


torch.manual_seed(0)
replicas = {"error": 2, "killed": SIZE, "axes": 2, "optimizer": SIZE}[KIND]


class Fails(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 8 and RANK == 1:
            raise ValueError("a bad step")
        return super().step(closure)


trainer = stretto.Trainer(
    [nn.Linear(8, 8), Fragile()], nn.functional.cross_entropy,
    lambda p: (Fails if KIND == "optimizer" else torch.optim.SGD)(p, lr=0.1), "pb",
    mesh=stretto.Mesh(data=replicas), sync=sys.argv[2],
)  # fmt: skip
for _ in range(12):
    trainer.step(torch.randn(6, 8), torch.randint(4, (6,)))
trainer.flush()
