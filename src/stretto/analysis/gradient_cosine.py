"""Cosines between the gradients that train each stage and backpropagation's (Laskin, Metz et al. 2020, fig. 6a).

Both are computed at the same weights on the same examples, so they do not depend on delays. Every loss has its own
graph, from the lowest stage that it trains up to its head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.analysis.frozen_model import frozen
from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.losses.minibatch_counts import Target
from stretto.nn.batch import Batches, call, first_size, inputs_of, with_names_of
from stretto.nn.chain import Chain
from stretto.options.checks import of_kind, sequence
from stretto.schedule import Reach
from stretto.stage.stage import head_loss_and_weight

Gradients = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class Alignment:
    """By stage: the cosine, None where a gradient is zero; and the loss of the stage's head, None without a head."""

    cosines: tuple[float | None, ...]
    losses: tuple[float | None, ...]


def alignment(
    stages: Sequence[nn.Module],
    heads: Sequence[nn.Module | None],
    reach: Reach,
    loss: Loss,
    batches: Iterable[tuple[Any, Any]],
) -> Alignment:
    """The cosine of local and backpropagated gradients for each stage, over all examples of `batches`, pairs (x, y).

    Gradients are those of all parameters of a stage without its head. Dropout and batch statistics are off; modules
    stay as they are. It costs a forward and a backward for each head, and those of backpropagation. Raises UsageError
    without examples.
    """
    check(stages, heads, reach)
    checked_batches = Batches("alignment", batches)
    local, backprop = Gradients(), Gradients()
    sums, weights, examples = [0.0] * len(stages), [0.0] * len(stages), 0
    parts = nn.ModuleList([part for part in (*stages, *heads) if part is not None])
    output = reach.num_stages - 1
    with frozen(parts), checked_batches.explaining_misfits():
        for x, y in checked_batches:
            size = first_size(x)
            examples += size
            inputs = inputs_of(x)
            stage_inputs = boundaries(stages, inputs)
            target = Target(y, inputs=inputs)
            for head in reach.heads:
                lowest = head - (reach.hops[head] or 0)
                segment = stages[lowest : head + 1]
                value, weight = segment_loss(segment, stage_inputs[lowest], heads[head], loss, target, size)
                add_gradients(local, segment, value, weight)
                sums[head] += float(value.detach()) * weight
                weights[head] += weight
            add_gradients(backprop, stages, *segment_loss(stages, inputs, heads[output], loss, target, size))
    if not examples:
        raise UsageError("alignment got no examples: the iterable of batches is empty (a used-up generator?)")
    return Alignment(
        tuple(cosine(stage, local, backprop) for stage in stages),
        tuple(sums[s] / weights[s] if weights[s] else None for s in range(reach.num_stages)),
    )


def check(stages: Sequence[nn.Module], heads: Sequence[nn.Module | None], reach: Reach) -> None:
    """Raise UsageError for stages or heads of a wrong type or number."""
    of_kind("reach", reach, Reach, "trainer.rules.reach")
    for name, parts in (("stages", stages), ("heads", heads)):
        sequence(name, parts, f"a list with an entry for each stage, such as trainer.{name}")
        if len(parts) != reach.num_stages:
            raise UsageError(f"alignment: {len(parts)} {name} for a reach of {reach.num_stages} stages")
        for index, part in enumerate(parts):
            if part is not None or name == "stages":
                of_kind(f"{name}[{index}]", part, nn.Module, "an nn.Module")


@torch.no_grad()
def boundaries(stages: Sequence[nn.Module], inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The inputs of each stage."""
    stage_inputs = [inputs]
    for stage in stages[:-1]:
        clones = [tensor.clone() for tensor in stage_inputs[-1]]  # the stage may work in place
        output = call(stage, with_names_of(stage_inputs[-1], clones))
        stage_inputs.append(output if isinstance(output, tuple) else (output,))
    return stage_inputs


def segment_loss(
    stages: Sequence[nn.Module],
    inputs: tuple[Tensor, ...],
    head: nn.Module | None,
    loss: Loss,
    target: Target,
    examples: int,
) -> tuple[Tensor, float]:
    """The loss at the end of consecutive stages, and its weight among the losses of all batches."""
    output = call(Chain(*stages), with_names_of(inputs, [tensor.clone() for tensor in inputs]))
    features = output if isinstance(output, tuple) else (output,)
    return head_loss_and_weight(loss, head, features, output, target, examples=examples)


def add_gradients(total: Gradients, stages: Sequence[nn.Module], value: Tensor, weight: float) -> None:
    """Add `weight` times the gradients of a loss to `total`."""
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    if not parameters or not value.requires_grad:
        return
    for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            so_far = total.get(parameter)
            total[parameter] = weight * gradient if so_far is None else so_far.add_(gradient, alpha=weight)


def cosine(stage: nn.Module, one: Gradients, other: Gradients) -> float | None:
    """The cosine over all parameters of a stage together, in float64; None where a gradient is zero."""
    shared = [p for p in stage.parameters() if p in one and p in other]
    if not shared:
        return None
    a, b = (torch.cat([gradients[p].flatten().double() for p in shared]) for gradients in (one, other))
    lengths = float(a.norm()) * float(b.norm())
    return float(a @ b) / lengths if lengths else None
