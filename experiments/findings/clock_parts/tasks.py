"""What processes of the launches of study 5 do: each function builds, and returns what measures."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.examples import stages_of
from harness.launches import Measure
from harness.steps import seconds_a_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clock_parts.settings import AVERAGED_EVERY, REPLICAS, SETTINGS, Setting, trainer_of

RATE = 1e-3


def threads(letter: str, threads: int, steps: int | None = None) -> Measure:
    """Plain training in one process with so many threads, at most one for each core."""
    torch.set_num_threads(min(threads, os.cpu_count() or 1))
    setting = SETTINGS[letter]
    model = nn.Sequential(*stages_of(setting.recipe(setting.random()), 1, 0))
    step = _loop(setting, model, *_minibatch(setting))
    return lambda: seconds_a_step(step, steps=steps)


def replicas(letter: str, steps: int | None = None) -> Measure:
    """torch's DistributedDataParallel, each process with its part of the minibatch."""
    setting = SETTINGS[letter]
    model = DistributedDataParallel(nn.Sequential(*stages_of(setting.recipe(setting.random()), 1, 0)))
    x, y = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in _minibatch(setting))
    step = _loop(setting, model, x, y)
    return lambda: seconds_a_step(step, steps=steps)


def pipeline(letter: str, method: str, steps: int | None = None) -> Measure:
    """A stage a process, by a method of this package, or a replica a process that averages now and then."""
    setting, stages = SETTINGS[letter], dist.get_world_size()
    trainer = trainer_of(setting, method, stages, setting.random(), rate=RATE, seed=0)
    x, y = _minibatch(setting)

    def measure() -> dict[str, float]:
        averaged = method.startswith(REPLICAS)
        how = {"multiple": AVERAGED_EVERY} if averaged else {"fill": 2 * stages}
        figures = seconds_a_step(lambda: trainer.step(x, y), steps=steps, **how)
        trainer.flush()
        return figures

    return measure


def _minibatch(setting: Setting) -> tuple[Tensor, Tensor]:
    data = setting.random().train
    rows = torch.arange(setting.batch) % len(data)
    return data.x[rows], data.y[rows]


def _loop(setting: Setting, model: nn.Module, x: Any, y: Tensor) -> Callable[[], float]:
    """The plain training loop, with the setting's clipping and schedule."""
    optimizer = setting.step(model.parameters(), lr=RATE)
    scheduler = setting.scheduler(optimizer)

    def step() -> float:
        optimizer.zero_grad()
        loss = setting.loss(model(x), y)
        loss.backward()
        if setting.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return step
