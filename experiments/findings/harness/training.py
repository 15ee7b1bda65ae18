"""One run: train step by step, evaluate now and then, and keep what the rules ask for."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import stretto
from stretto.data import Dataset, Split

Batches = Sequence[tuple[Any, Any]]
DIVERGED = 4.0  # times its first training loss
SHOWN = 6  # significant digits of what is stored


class _Losses:
    """The first and the last `window` training losses: do they diverge?"""

    def __init__(self, window: int) -> None:
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=window)

    def diverge(self, loss: float) -> bool:
        """Whether this loss, the next one, is no number, or the last ones' mean is above four times the first ones'."""
        self.last.append(loss)
        if len(self.first) < (self.last.maxlen or 1):
            self.first.append(loss)
        return not math.isfinite(loss) or statistics.fmean(self.last) > DIVERGED * statistics.fmean(self.first)


def measured_training(
    trainer: stretto.Trainer,
    batches: Callable[[int], tuple[Any, Any]],
    steps: int,
    every: int,
    held: Mapping[str, Batches],
    *,
    window: int = 1,
) -> dict[str, Any]:
    """Train for so many steps and evaluate before the first one and after every `every`.

    `batches(n)` is minibatch n, `held` what `held_out` returned. Returns the curve, a list of [step, mean training loss
    since the last evaluation, test loss, test error]; the validation loss at the end, None for a run that diverged;
    `diverged`, the step at which it was stopped, or None; the seconds a step, wall and CPU; and the memory, as rule 11
    counts it. Training losses of asynchronous methods are told `lag` steps late; each counts where it is told. Numbers
    that are none are None. `window` is of how many training losses rule 15 takes the mean, of the first ones and of the
    last.
    """
    wall = cpu = 0.0
    losses, diverged, told = _Losses(window), None, []
    curve = [[0, None, *_evaluated(trainer, held["test"])]]
    for n in range(steps):
        began = time.perf_counter(), time.process_time()
        loss = trainer.step(*batches(n))
        wall, cpu = wall + time.perf_counter() - began[0], cpu + time.process_time() - began[1]
        if loss is not None:
            told.append(loss)
            if losses.diverge(loss):
                diverged = n + 1
                break
        if (n + 1) % every == 0 or n + 1 == steps:
            mean = sum(told) / len(told) if told else None
            curve.append([n + 1, _number(mean), *_evaluated(trainer, held["test"])])
            told = []
    done = diverged or steps
    return {
        "curve": curve,
        "validation": None if diverged else _number(trainer.evaluate(held["validation"])["loss"]),
        "diverged": diverged,
        "seconds a step": {"wall": _number(wall / done), "cpu": _number(cpu / done)},
        "memory": {"weight copies": weight_copies(trainer), "optimizer numbers": optimizer_numbers(trainer)},
    }


def shuffled(split: Split, batch: int, seed: int) -> Callable[[int], tuple[Any, Any]]:
    """A function from n to minibatch n: one order of the examples, which the seed decides, again and again."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))

    def minibatch(n: int) -> tuple[Any, Any]:
        return split.read(order[torch.arange(n * batch, (n + 1) * batch) % len(order)])

    return minibatch


def held_out(data: Dataset, number: int, batch: int | None = None) -> dict[str, Batches]:
    """The first examples of the test and of the validation split, as one batch or in batches of so many."""
    assert data.test is not None
    splits = {"test": data.test, "validation": data.validation}
    return {name: list(Split(*split.first(number)).batches(batch or number)) for name, split in splits.items()}


def optimizer_numbers(trainer: stretto.Trainer) -> float:
    """How many numbers the optimizers keep for each trained parameter; counters of one number are left out."""
    kept = sum(
        value.numel()
        for optimizer in trainer.optimizers
        if optimizer is not None
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    return round(kept / sum(parameters_of(trainer)), 3)


def weight_copies(trainer: stretto.Trainer) -> float:
    """How many versions of a weight the method holds at once: a mean over stages, weighted by their parameters."""
    sizes = parameters_of(trainer)
    versions = trainer.method.versions(trainer.schedule)
    return round(sum(map(lambda size, held: size * held, sizes, versions)) / sum(sizes), 3)


def parameters_of(trainer: stretto.Trainer) -> list[int]:
    """Trained parameters of each stage."""
    return [sum(p.numel() for p in stage.parameters() if p.requires_grad) for stage in trainer.stages]


def _evaluated(trainer: stretto.Trainer, batches: Batches) -> Iterator[float | None]:
    found = trainer.evaluate(batches)
    yield _number(found["loss"])
    yield _number(1 - found["accuracy"])


def _number(value: float | None) -> float | None:
    return float(f"{value:.{SHOWN}g}") if value is not None and math.isfinite(value) else None
