"""The two settings of study 5: network, data, optimizer, and a Trainer of them."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from depth import SCHEDULE
from harness.examples import made_up, mnist, stages_of, text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import stretto
from stretto.data import Dataset
from stretto.losses import token_cross_entropy
from stretto.models.mlp import mlp
from stretto.models.model import Recipe
from stretto.models.transformer import transformer
from stretto.optim import warmup

Chosen = Mapping[str, Mapping[str, Mapping[int, str]]]
"""Methods by kind ("asynchronous", "local"), setting and number of processes."""
Links = Sequence[int | None]
PROCESSES, LINKS = (2, 4), (None, 100, 400)
AVERAGED_EVERY = 8  # updates between two averages
REPLICAS = "local-sgd"  # what begins so is a sync of replicas, each with the whole network


@dataclass(frozen=True)
class Setting:
    """A network of 8 blocks with its data and optimizer; `activations` are the numbers between two stages."""

    data: Callable[[str | None], Dataset]
    random: Callable[[], Dataset]
    recipe: Callable[[Dataset], Recipe]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: str
    step: Callable[..., torch.optim.Optimizer]
    grid: tuple[float, ...]
    scheduler: Callable[[Any], torch.optim.lr_scheduler.LambdaLR]
    clip: float | None
    batch: int
    activations: int
    tested: int
    evaluated: int


SETTINGS = {
    "A": Setting(
        data=partial(mnist, tested=2000), random=lambda: made_up((1, 28, 28), 10), recipe=partial(mlp, width=1024),
        loss=cross_entropy, optimizer="SGD", step=partial(torch.optim.SGD, momentum=0.9),
        grid=(0.003, 0.01, 0.03, 0.1), scheduler=warmup(0), clip=None, batch=64, activations=64 * 1024,
        tested=2000, evaluated=500,
    ),
    "B": Setting(
        data=partial(text, context=64), random=lambda: made_up((64,), 100, tokens=True),
        recipe=partial(transformer, depth=8, width=128, heads=4), loss=token_cross_entropy, optimizer="AdamW",
        step=partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.01), grid=(0.001, 0.002, 0.004, 0.008),
        scheduler=SCHEDULE, clip=1.0, batch=16, activations=16 * 64 * 128, tested=256, evaluated=64,
    ),
}  # fmt: skip


def trainer_of(setting: Setting, method: str, stages: int, data: Dataset, *, rate: float, seed: int) -> stretto.Trainer:
    """A Trainer of the setting's network in so many stages, on one process or on as many as there are stages.

    A sync of replicas is a Trainer of as many replicas of one stage.
    """
    averaged = method.startswith(REPLICAS)
    replicas = {"mesh": stretto.Mesh(data=stages), "sync": method} if averaged else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it will overshoot")  # of predictions: that is what is asked
        return stretto.Trainer(
            stages_of(setting.recipe(data), 1 if averaged else stages, seed), setting.loss,
            partial(setting.step, lr=rate), "backprop" if averaged else method, example=data.train.x[:2],
            scheduler=setting.scheduler, clip=setting.clip, device="cpu", seed=seed, **replicas,
        )  # fmt: skip


@functools.cache
def parameters(setting: Setting) -> int:
    """The number of weights and biases."""
    whole = nn.Sequential(*stages_of(setting.recipe(setting.random()), 1, 0))
    return sum(parameter.numel() for parameter in whole.parameters())
