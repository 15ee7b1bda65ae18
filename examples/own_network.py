"""Train a network of your own under four methods and compare what they reach and cost.

python examples/own_network.py
"""

import torch
from torch import nn

import stretto
from stretto import cost

torch.manual_seed(0)
torch.set_num_threads(1)

# Two noisy spirals: 2 numbers in, 2 classes out.
turn = torch.rand(1024) * 6
label = torch.arange(1024) % 2
angle = turn + label * torch.pi
points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 3 + torch.randn(1024, 2) * 0.05


def network() -> nn.Sequential:
    """Six hidden layers."""
    torch.manual_seed(1)
    hidden = [nn.Sequential(nn.Linear(2 if i == 0 else 64, 64), nn.GELU()) for i in range(6)]
    return nn.Sequential(*hidden, nn.Linear(64, 2))


for method in ("backprop", "greedy", "overlapping", "chunked(chunks=2)"):
    trainer = stretto.Trainer(
        stretto.split(network(), 6, example=points[:64]),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300),
        method=method,
        example=points[:64],
    )
    for step in range(300):
        batch = torch.randint(0, 1024, (64,), generator=torch.Generator().manual_seed(step))
        trainer.step(points[batch], label[batch])
    trainer.flush()
    result = trainer.evaluate([(points, label)])
    costs = cost.measure(trainer, points[:64], label[:64])
    print(
        f"{method:<18} accuracy {result['accuracy']:.1%}   loss {result['loss']:.4f}   "
        f"total {costs.total / 1e3:6.1f} kFLOP an example   serial {costs.serial / 1e3:6.1f}"
    )
