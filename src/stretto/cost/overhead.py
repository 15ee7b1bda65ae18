"""What the runtime takes besides computing, for each action and each step: from pipelines of few and of many stages.

Among all processes of a job, one worker each, one after the other (backpropagation): nobody is disturbed by threads
that move messages. A step of K stages on each of W workers takes, with forwards F, backwards B and an update U,

    t(K) = K (W (F + B) + U) + K (2 W + 1) per_action + per_step + messages

Layers are large enough that between two actions the processor's caches forget the runtime, as they do in training.
"""

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from stretto.cost.layers import layer_costs
from stretto.cost.stopwatch import with_times
from stretto.cost.transport import Passage
from stretto.trainer import Trainer

WIDTH, BATCH, MANY = 256, 64, 6  # the size of a layer; stages a worker
STEPS, BLOCKS = 12, 5


class Overhead(NamedTuple):
    """Seconds of the runtime for each action and for each step, messages not included."""

    per_action: float
    per_step: float


def measure_overhead(group: dist.ProcessGroup, message: Passage) -> Overhead:
    """Both, the same on all processes. `message` is what a small one takes."""
    workers = group.size()
    few, many = (pipeline(workers, stages) for stages in (1, MANY))
    passes, update = alone(group)
    one, several = interleaved(group, few, many)
    stage = workers * passes + update
    per_action = max(0.0, ((several - one) / (MANY - 1) - stage) / (2 * workers + 1))
    ways = 2 * (workers - 1)  # up and down; the loss has long arrived when it is heard
    messages = ways * (message.send + message.travel + message.receive) + message.receive
    return Overhead(per_action, max(0.0, one - stage - (2 * workers + 1) * per_action - messages))


def pipeline(workers: int, stages: int) -> Trainer:
    """A pipeline of so many stages of one layer a worker."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(workers * stages)]
    return Trainer(layers, mse_loss, optimizer, "backprop", workers=workers, device="cpu")


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps by nothing."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def interleaved(group: dist.ProcessGroup, *trainers: Trainer) -> list[float]:
    """Seconds of a step of each, medians of means, the mean over all processes; they take turns."""
    x = torch.randn(BATCH, WIDTH)
    for trainer in trainers:
        trainer.step(x, x)
    taken: list[list[float]] = [[] for _ in trainers]
    for _ in range(BLOCKS):
        for trainer, samples in zip(trainers, taken, strict=True):
            dist.barrier(group=group)
            begin = time.perf_counter()
            for _ in range(STEPS):
                trainer.step(x, x)
            samples.append((time.perf_counter() - begin) / STEPS)
    for trainer in trainers:
        trainer.flush()
    times = torch.tensor([statistics.median(samples) for samples in taken], dtype=torch.float64)
    dist.all_reduce(times, group=group)
    found: list[float] = (times / group.size()).tolist()
    return found


def alone(group: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds of forward and backward of such a layer, and of its update, while the other processes wait."""
    found = torch.zeros(2, dtype=torch.float64)
    if group.rank() == 0:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(MANY)]
        examples = [torch.randn(n, WIDTH) for n in (BATCH // 2, BATCH)]
        timed = with_times(layer_costs(layers, examples[1]), layers, examples, optimizer=optimizer, repeats=2 * STEPS)
        each = [row.measured for row in timed.layers[1:] if row.measured is not None]
        found[0] = statistics.fmean(m.forward.at(BATCH) + m.backward.at(BATCH) for m in each) + timed.start
        found[1] = statistics.fmean(m.update or 0.0 for m in each) + timed.step
    dist.broadcast(found, 0, group=group)
    passes, update = found.tolist()
    return passes, update
