"""A script in which something goes wrong on one worker: python faulty.py KIND."""

import os
import sys
import time

import torch
from torch import nn

import stretto

torch.set_num_threads(1)
KIND, RANK = sys.argv[1], int(os.environ["RANK"])


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 6:
            if KIND == "error":
                raise ValueError("bad luck")
            if KIND == "killed":
                os.kill(os.getpid(), 9)
            if KIND == "stuck":
                time.sleep(1000)
        return torch.tanh(self.linear(x))


if KIND == "mistake":
    stages = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    stretto.Trainer(stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), "pbb")
torch.manual_seed(0)
stages = [nn.Linear(8, 8), nn.Linear(8, 8) if KIND == "script" else Fragile(), nn.Linear(8, 4)]
stages = [*stages, nn.Linear(4, 4)] if KIND == "late" else stages
trainer = stretto.Trainer(
    stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1),
    "1f1b" if KIND == "method" and RANK == 0 else "pb",
    timeout=8 if KIND == "stuck" else 300,
)  # fmt: skip
if KIND == "late":  # three have what was told, and have come to their end, long before the last asks for it
    time.sleep(8 * (RANK == 3))
    sys.exit(trainer.backend.broadcast({"told": 1}) != {"told": 1})
for n in range(12):
    trainer.step(torch.randn(4, 8), torch.randint(4, (4,)))
    if KIND == "script" and n == 5 and RANK == 1:
        raise KeyError("my own mistake")
    if KIND == "leaves" and n == 5 and RANK == 1:
        sys.exit(3)
trainer.flush()
