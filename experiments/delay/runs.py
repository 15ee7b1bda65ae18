"""The runs of the study: each trains one method's networks, all seeds and rates side by side."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from network import STAGES, WIDTH, stages
from torch import Tensor, nn

import stretto
from stretto.data import Split, load

BATCH, MOMENTUM = 8, 0.9  # what the rates of SGD are given for; updates are of one example
ADAM_RATES = (0.0001, 0.0003, 0.001, 0.003)
RATES = {"sgd": (0.001, 0.004, 0.008, 0.016, 0.032), "adam": ADAM_RATES, "nadam": ADAM_RATES}
SEEDS, EPOCHS = (0, 1, 2), 12
RESCHEDULE = 3000  # updates of T1, a quarter of the run

METHODS = {
    "sgd": {
        "no delay": "backprop",
        "PB": "pb",
        "PB, stash": "pb(stash=True)",
        "PipeDream": "pipedream",
        "SC": "pb-sc",
        "LWP, velocity": "pb-lwp",
        "LWP, velocity + SC": "pb(predict=velocity, spike=True)",
        "LWP, weight + SC": "pb-lwp-sc",
        "SpecTrain": "spectrain",
        "PipeMare T1": f"pipemare(reschedule={RESCHEDULE}, correct=False)",
        "PipeMare T2": "pipemare",
        "PipeMare T1 + T2": f"pipemare(reschedule={RESCHEDULE})",
    },
    "adam": {
        "no delay": "backprop",
        "PB": "pb",
        "PipeDream": "pipedream",
        "PipeOptim": "pipeoptim",
        "PB, predicted along the step": "pb(predict=step)",  # at a constant rate the same as LWP, weight form
        "PipeMare T1": f"pipemare(reschedule={RESCHEDULE}, correct=False)",
        "PipeMare T2": "pipemare",
        "PipeMare T1 + T2": f"pipemare(reschedule={RESCHEDULE})",
    },
    "nadam": {"Nesterov, asynchronous": "nesterov"},
}


@dataclass(frozen=True)
class Run:
    """One pass through the data for all seeds and rates of an optimizer."""

    optimizer: str
    name: str
    method: str
    seeds: tuple[int, ...] = SEEDS
    epochs: int = EPOCHS

    @property
    def networks(self) -> list[tuple[float, int]]:
        """(rate, seed) of every network."""
        return [(rate, seed) for rate in RATES[self.optimizer] for seed in self.seeds]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers."""
        return {
            "method": self.method,
            "optimizer": self.optimizer,
            "rates": list(RATES[self.optimizer]),
            "seeds": list(self.seeds),
            "epochs": self.epochs,
            "stages": STAGES,
            "width": WIDTH,
        }


def all_runs() -> list[Run]:
    """Those that others are compared with come first."""
    return [Run(kind, name, method) for kind, methods in METHODS.items() for name, method in methods.items()]


def optimizer(kind: str, rate: float, eps: float = 1e-8) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """What makes a stage's optimizer: SGD scaled from batches of eight, Adam with the same first beta, NAdam(0.99)."""
    scaled, momentum = stretto.scale_for_batch(rate, MOMENTUM, BATCH, to=1)
    if kind == "sgd":
        return lambda params: torch.optim.SGD(params, lr=scaled, momentum=momentum, fused=True)
    if kind == "adam":
        return lambda params: torch.optim.Adam(params, lr=rate, betas=(momentum, 0.999), eps=eps, fused=True)
    return lambda params: torch.optim.NAdam(params, lr=rate, betas=(0.99, 0.999), eps=eps)


def scales(kind: str, rates: list[float]) -> list[float]:
    """What multiplies the parameters of networks that are to train at these rates, if the first is the optimizer's."""
    power = 0.5 if kind == "sgd" else 1.0
    return [(rate / rates[0]) ** power for rate in rates]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The sum over networks, so that each has the gradient of its own: output [K, N, 10], target [K, N]."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def train(run: Run, on_epoch: Callable[[int], object] = lambda _: None) -> dict[str, Any]:
    """The run's settings, and the test accuracy of each network after each epoch."""
    torch.set_num_threads(1)
    data = load("digits")
    rates = [rate for rate, _ in run.networks]
    seeds = [seed for _, seed in run.networks]
    modules = stages(seeds, scales(run.optimizer, rates))
    trainer = stretto.Trainer(modules, loss, optimizer(run.optimizer, rates[0]), run.method, workers=1, device="cpu")
    accuracy, start = [], time.perf_counter()
    for epoch in range(run.epochs):
        for x, y in examples(data.train, seeds, epoch):
            trainer.step(x, y)
        if epoch == run.epochs - 1:
            trainer.flush()
        accuracy.append(evaluate(trainer.model, data.test, len(seeds)))
        on_epoch(epoch + 1)
    return {
        "name": run.name,
        "settings": run.settings,
        "accuracy": [
            {"rate": rate, "seed": seed, "test": [each[k] for each in accuracy]}
            for k, (rate, seed) in enumerate(run.networks)
        ],
        "seconds": round(time.perf_counter() - start),
    }


def examples(split: Split, seeds: list[int], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One example for each network at a time, x [K, 1, 64] and y [K, 1], in the order of the network's seed."""
    draws = [torch.Generator().manual_seed(1000 * seed + epoch) for seed in seeds]
    orders = [torch.randperm(len(split), generator=draw) for draw in draws]
    x = split.x.flatten(1)
    for rows in torch.stack(orders, 1):
        yield x[rows].unsqueeze(1), split.y[rows].unsqueeze(1)


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, networks: int) -> list[float]:
    """Each network's accuracy; 0 for one whose output is no number any more."""
    output = model(split.x.flatten(1).expand(networks, -1, -1))
    right = (output.argmax(-1) == split.y).double().mean(-1)
    return [
        float(share) if math.isfinite(total) else 0.0 for share, total in zip(right, output.sum((1, 2)), strict=True)
    ]
