"""What the runtime takes besides computing, for each action and each step: from pipelines of few and of many stages.

Among all processes of a job, one worker each, one after the other (backpropagation): nobody is disturbed by threads
that move messages. A step of K stages on each of W workers takes, with forwards F, backwards B and an update U,

    t(K) = K (W (F + B) + U) + K (2 W + 1) per_action + per_step + messages

Layers are large enough that between two actions the processor's caches forget the runtime, as they do in training.
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stretto.cost.layer_table import ModelCosts
from stretto.measure.layer_flops import layer_costs
from stretto.measure.layer_times import with_times
from stretto.measure.messages import Passage, agreed
from stretto.trainer.trainer import Trainer

WIDTH, BATCH, MANY = 256, 64, 6  # the size of a layer; stages a worker
STEPS, REPEATS, BLOCKS = 12, 4, 7  # of a block: steps of a pipeline, repeats of layers alone


class Overhead(NamedTuple):
    """Seconds of the runtime for each action and for each step, messages not included."""

    per_action: float
    per_step: float


def measure_overhead(group: dist.ProcessGroup, message: Passage) -> Overhead:
    """Both, the same on all processes: medians over blocks. `message` is what a small one takes."""
    pipelines = [pipeline(group.size(), stages) for stages in (1, MANY)]
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(MANY)]
    costs = layer_costs(layers, torch.zeros(BATCH, WIDTH))
    found = [overhead(group, pipelines, layers, costs, message) for _ in range(1 + BLOCKS)][1:]
    for each in pipelines:
        each.flush()
    return Overhead(*(max(0.0, statistics.median(column)) for column in zip(*found, strict=True)))


def overhead(
    group: dist.ProcessGroup,
    pipelines: Sequence[Trainer],
    layers: Sequence[nn.Module],
    costs: ModelCosts,
    message: Passage,
) -> Overhead:
    """From one block: a core's speed may have changed by the next one."""
    workers = group.size()
    one, several = (steps(group, each) for each in pipelines)
    passes, update = alone(group, layers, costs)
    stage = workers * passes + update
    per_action = ((several - one) / (MANY - 1) - stage) / (2 * workers + 1)
    ways = 2 * (workers - 1)  # up and down; the loss has long arrived when it is heard
    messages = ways * (message.send + message.travel + message.receive) + message.receive
    return Overhead(per_action, one - stage - (2 * workers + 1) * per_action - messages)


def measure_overhead_alone() -> Overhead:
    """Both, of training in this process alone: the median over blocks."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(MANY)]
    x = torch.zeros(BATCH, WIDTH)
    costs = layer_costs(layers, x, loss=mse_loss, target=x)
    examples = [torch.randn(n, WIDTH) for n in (BATCH // 2, BATCH)]
    trainers = [Trainer(layers[:stages], mse_loss, optimizer, "backprop", device="cpu") for stages in (1, MANY)]
    x, found = torch.randn(BATCH, WIDTH), []
    for _ in range(1 + BLOCKS):
        one, several = (seconds_of_steps(trainer, x) for trainer in trainers)
        timed = with_times(
            costs, layers, examples, loss=mse_loss, targets=examples, optimizer=optimizer, repeats=REPEATS
        )
        one, several = one - computing(timed, 1), several - computing(timed, MANY)
        per_action = (several - one) / (MANY - 1) / 3
        found.append(Overhead(per_action, one - 3 * per_action))
    return Overhead(*(max(0.0, statistics.median(column)) for column in zip(*found[1:], strict=True)))


def computing(timed: ModelCosts, stages: int) -> float:
    """Seconds of a step of so many stages of one layer each: passes, updates and the loss."""
    *rows, loss = [row.measured for row in timed.layers if row.measured is not None]
    first, *others = rows[:stages]
    passes = sum(m.forward.at(BATCH) + m.backward.at(BATCH) for m in (*others, loss))
    lowest = first.forward.at(BATCH) + (first.weight_gradient or first.backward).at(BATCH)
    updates = sum(m.update or 0.0 for m in rows[:stages])
    return passes + lowest + updates + stages * (timed.start + timed.step)


def seconds_of_steps(trainer: Trainer, x: Tensor) -> float:
    """Seconds of a step, the mean over some."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        trainer.step(x, x)
    return (time.perf_counter() - begin) / STEPS


def pipeline(workers: int, stages: int) -> Trainer:
    """A pipeline of so many stages of one layer a worker."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(workers * stages)]
    return Trainer(layers, mse_loss, optimizer, "backprop", workers=workers, device="cpu")


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum whose learning rate is 0: weights stay as they are."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def steps(group: dist.ProcessGroup, trainer: Trainer) -> float:
    """Seconds of a step, the mean over steps and processes."""
    x = torch.randn(BATCH, WIDTH)
    dist.barrier(group=group)
    return agreed(group, seconds_of_steps(trainer, x))


def alone(group: dist.ProcessGroup, layers: Sequence[nn.Module], costs: ModelCosts) -> tuple[float, float]:
    """Seconds of forward and backward of such a layer, and of its update: each process while the others wait."""
    examples = [torch.randn(n, WIDTH) for n in (BATCH // 2, BATCH)]
    for rank in range(group.size()):
        dist.barrier(group=group)
        if rank == group.rank():
            timed = with_times(costs, layers, examples, optimizer=optimizer, repeats=REPEATS)
    passes, update = passes_and_update(timed)
    return agreed(group, passes), agreed(group, update)


def passes_and_update(timed: ModelCosts) -> tuple[float, float]:
    """Seconds of forward and backward of a layer but the first, and of its update."""
    each = [row.measured for row in timed.layers[1:] if row.measured is not None]
    passes = statistics.fmean(m.forward.at(BATCH) + m.backward.at(BATCH) for m in each) + timed.start
    return passes, statistics.fmean(m.update or 0.0 for m in each) + timed.step
