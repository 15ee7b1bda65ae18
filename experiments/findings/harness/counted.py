"""What a method costs, counted on its modules: compute of a step, of its heads, memory of a worker, bytes sent."""

import itertools

from torch import Tensor

import stretto
from stretto.cost.head_costs import StageHeads
from stretto.cost.layer_table import LayerCost, ModelCosts
from stretto.cost.worker_memory import peak_bytes
from stretto.measure import layer_costs, measure
from stretto.nn.batch import inputs_of
from stretto.schedule import Rules, Schedule
from stretto.study.counted_heads import counted_head
from stretto.study.model_costs import outputs


def compute(trainer: stretto.Trainer, x: Tensor, y: Tensor) -> dict[str, float]:
    """FLOPs of a step on examples like (x, y), by torch's counter; heads included.

    "total" is of one example. "serial" is the time of a step in the long run, one worker a stage, with FLOPs as
    seconds, all examples in parallel and free messages. "paper total" and "paper serial" charge a backward as two
    forwards. "heads": those of heads and their losses alone, forward and backward, of one example.
    """
    counted, paper = measure(trainer, x, y), measure(trainer, x, y, "paper")
    heads = sum(row.flops(kind).at(len(x)) for row in head_costs(trainer, x, y) if row for kind in ("F", "B"))
    found = {"total": counted.total, "serial": counted.serial, "paper total": paper.total}
    return {**found, "paper serial": paper.serial, "heads": heads / len(x)}


def head_costs(trainer: stretto.Trainer, x: Tensor, y: Tensor) -> list[LayerCost | None]:
    """The costs of each stage's head with its loss; None where there is none."""
    inputs = inputs_of(x)
    return [
        None if head is None else counted_head(head, features, trainer.loss, inputs, y)
        for head, features in itertools.zip_longest(trainer.heads[:-1], outputs(trainer.stages, *inputs))
    ]


def worker_costs(
    trainer: stretto.Trainer, x: Tensor, y: Tensor, batch: int, optimizer: str, method: str | None = None
) -> dict[str, float]:
    """Bytes for minibatches of `batch` examples, a worker for each stage: the largest worker's memory, and messages.

    "memory" is the peak of tensors on the worker that needs most: weights, gradients, the state of the optimizer of
    this name, activations and message buffers. "sent" is what all workers send each other in a step. `method` is
    another method for the stages of a trainer without heads.
    """
    chosen, schedule, rules = trainer.method, trainer.schedule, trainer.rules
    if method is not None:
        chosen = stretto.method(method)
        schedule, rules = chosen.plan(len(trainer.stages), len(trainer.stages))
    costs, heads = (
        layer_costs(list(trainer.stages), inputs_of(x), loss=trainer.loss, target=y),
        head_costs(trainer, x, y),
    )
    bounds = (*range(schedule.num_stages), len(costs.layers))  # the loss belongs to the last stage
    share = batch / schedule.per_turn
    peaks = peak_bytes(chosen, schedule, rules, costs, bounds, share, optimizer=optimizer, behind=StageHeads(heads))
    return {"memory": max(peaks), "sent": sent_bytes(schedule, rules, costs, share)}


def sent_bytes(schedule: Schedule, rules: Rules, costs: ModelCosts, examples: float) -> float:
    """Bytes of activations and of gradients that stages send each other in a turn, once the pipeline is full."""
    turn = schedule.drain + 1
    actions = itertools.chain(*(schedule.turn(worker, turn) for worker in range(schedule.num_workers)))
    total = 0.0
    for edge in itertools.chain(*map(rules.makes, actions)):
        row = costs.layers[edge.source.stage]
        size = {"activation": row.output, "gradient": row.input}.get(edge.value)
        if size is not None and 0 <= edge.stage < schedule.num_stages and edge.stage != edge.source.stage:
            total += size.at(examples)
    return total
