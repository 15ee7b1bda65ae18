"""What a method costs, counted on its modules: compute of a step, of its heads, memory of a worker, bytes sent."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import stretto
from stretto.cost.layer_table import LayerCost, ModelCosts
from stretto.cost.worker_memory import peak_bytes
from stretto.measure import layer_costs, measure
from stretto.nn.batch import inputs_of
from stretto.nn.flop_counter import counting
from stretto.schedule import Rules, Schedule
from stretto.stage.stage import Target, head_loss
from stretto.study.counted_heads import counted_head
from stretto.study.model_costs import outputs

SHOWN = 6  # significant digits of what is stored


def compute(trainer: stretto.Trainer, x: Tensor, y: Tensor) -> dict[str, float]:
    """FLOPs of a step on examples like (x, y), by torch's counter; heads included.

    "total" is of one example. "serial" is the time of a step in the long run, one worker a stage, with FLOPs as
    seconds, all examples in parallel and free messages. "paper total" and "paper serial" charge a backward as two
    forwards. "heads": those of heads and their losses alone, forward and backward, of one example.
    """
    counted, paper = measure(trainer, x, y), measure(trainer, x, y, "paper")
    found = {"total": counted.total, "serial": counted.serial, "paper total": paper.total}
    return {**found, "paper serial": paper.serial, "heads": head_flops(trainer, x, y)}


def head_flops(trainer: stretto.Trainer, x: Tensor, y: Tensor) -> float:
    """FLOPs of the heads with their losses for one example: forwards and backwards, the gradient of inputs too."""
    inputs, total = inputs_of(x), 0
    features = outputs(trainer.stages, *inputs)
    for head, values in zip(trainer.heads[:-1], features, strict=False):
        if head is None:
            continue
        given = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
        with torch.enable_grad(), counting() as counter:
            loss = head_loss(trainer.loss, copy.deepcopy(head), given, given, Target(y, inputs=inputs))
            loss.backward()  # type: ignore[no-untyped-call]
        total += counter.get_total_flops()
    return total / len(x)


def worker_costs(trainer: stretto.Trainer, x: Tensor, y: Tensor, batch: int, optimizer: str) -> dict[str, float]:
    """Bytes for minibatches of `batch` examples, a worker for each stage: the largest worker's memory, and messages.

    "memory" is the peak of tensors on the worker that needs most: weights, gradients, the state of the optimizer of
    this name, activations and message buffers. "sent" is what all workers send each other in a step.
    """
    costs, heads = _stage_costs(trainer, x, y)
    share = batch / trainer.schedule.per_turn
    peaks = _peaks(trainer.method, trainer.schedule, trainer.rules, costs, heads, share, optimizer)
    return {"memory": peaks, "sent": sent_bytes(trainer.schedule, trainer.rules, costs, share)}


def pipelined_memory(
    method: str, trainer: stretto.Trainer, x: Tensor, y: Tensor, batch: int, optimizer: str
) -> dict[str, float]:
    """As `worker_costs`, for the stages of a trainer without heads under another method, with a worker for each."""
    costs, _ = _stage_costs(trainer, x, y)
    chosen = stretto.method(method)
    schedule, rules = chosen.plan(len(trainer.stages), len(trainer.stages))
    share = batch / schedule.per_turn
    peaks = _peaks(chosen, schedule, rules, costs, [None] * len(trainer.stages), share, optimizer)
    return {"memory": peaks, "sent": sent_bytes(schedule, rules, costs, share)}


def sent_bytes(schedule: Schedule, rules: Rules, costs: ModelCosts, examples: float) -> float:
    """Bytes of activations and of gradients that stages send each other in a turn, once the pipeline is full."""
    total, turn = 0.0, schedule.drain + 1
    for worker in range(schedule.num_workers):
        for action in schedule.turn(worker, turn):
            for edge in rules.makes(action):
                source = edge.source.stage
                if not 0 <= edge.stage < schedule.num_stages or edge.stage == source:
                    continue
                if edge.value in ("activation", "gradient"):
                    row = costs.layers[source]
                    total += (row.output if edge.value == "activation" else row.input).at(examples)
    return total


def _stage_costs(trainer: stretto.Trainer, x: Tensor, y: Tensor) -> tuple[ModelCosts, list[LayerCost | None]]:
    """The costs of each stage, those of the loss behind them, and of each stage's head."""
    inputs = inputs_of(x)
    features = outputs(trainer.stages, *inputs)
    heads: list[LayerCost | None] = [
        None if head is None else counted_head(head, values, trainer.loss, inputs[0], y)
        for head, values in itertools.zip_longest(trainer.heads[:-1], features)
    ]
    return layer_costs(list(trainer.stages), inputs, loss=trainer.loss, target=y), heads


def _peaks(
    method: Any, schedule: Schedule, rules: Rules, costs: ModelCosts, heads: Sequence[LayerCost | None],
    examples: float, optimizer: str,
) -> float:  # fmt: skip
    bounds = (*range(schedule.num_stages), len(costs.layers))  # the loss belongs to the last stage
    return max(peak_bytes(method, schedule, rules, costs, bounds, examples, optimizer=optimizer, heads=heads))
