"""How far the gradients that train each stage point where backpropagation's would (Laskin, Metz et al. 2020, fig. 6a).

Both are taken at the same weights on the same examples, so delays have no part in it. Every loss has a graph of its
own, from the lowest stage that it trains up to its head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.analysis.frozen_model import still
from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.nn.batch import call, first_size, inputs_of, like
from stretto.nn.batches import Batches
from stretto.nn.chain import Chain
from stretto.options.checks import of_kind, sequence
from stretto.schedule import Reach
from stretto.stage.stage import Target, head_loss_and_weight

Gradients = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class Alignment:
    """By stage: the cosine, None where a gradient is zero, and the loss of the stage's own head, None without one."""

    cosines: tuple[float | None, ...]
    losses: tuple[float | None, ...]


def alignment(
    stages: Sequence[nn.Module],
    heads: Sequence[nn.Module | None],
    reach: Reach,
    loss: Loss,
    batches: Iterable[tuple[Any, Any]],
) -> Alignment:
    """Over all parameters of a stage, without its head, and all examples of `batches`.

    Dropout and batch statistics are off, nothing of the modules changes. It costs a forward and a backward for each
    loss, and those of backpropagation. Raises UsageError where there are no examples.
    """
    check(stages, heads, reach)
    given_batches = Batches("alignment", batches)
    local, whole = Gradients(), Gradients()
    sums, weights, examples = [0.0] * len(stages), [0.0] * len(stages), 0
    parts = nn.ModuleList([each for each in (*stages, *heads) if each is not None])
    output = reach.num_stages - 1
    with still(parts), given_batches.fitting():
        for x, y in given_batches:
            size = first_size(x)
            examples += size
            inputs = inputs_of(x)
            given = boundaries(stages, inputs)
            target = Target(y, inputs=inputs)
            for head in reach.heads:
                low = head - (reach.hops[head] or 0)
                value, weight = segment_loss(stages[low : head + 1], given[low], heads[head], loss, target, size)
                add_gradients(local, stages[low : head + 1], value, weight)
                sums[head] += float(value.detach()) * weight
                weights[head] += weight
            add_gradients(whole, stages, *segment_loss(stages, inputs, heads[output], loss, target, size))
    if not examples:
        raise UsageError("alignment got no examples: the iterable of batches is empty (a used-up generator?)")
    return Alignment(
        tuple(cosine(stage, local, whole) for stage in stages),
        tuple(sums[s] / weights[s] if weights[s] else None for s in range(reach.num_stages)),
    )


def check(stages: Sequence[nn.Module], heads: Sequence[nn.Module | None], reach: Reach) -> None:
    """Refuse parts that are none, or of another number of stages."""
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
    """What each stage is given."""
    given = [inputs]
    for stage in stages[:-1]:
        made = call(stage, like(given[-1], [tensor.clone() for tensor in given[-1]]))  # it may work in place
        given.append(made if isinstance(made, tuple) else (made,))
    return given


def segment_loss(
    stages: Sequence[nn.Module],
    inputs: tuple[Tensor, ...],
    head: nn.Module | None,
    loss: Loss,
    target: Target,
    examples: int,
) -> tuple[Tensor, float]:
    """The loss at the end of consecutive stages, and how much it weighs beside those of other batches."""
    output = call(Chain(*stages), like(inputs, [tensor.clone() for tensor in inputs]))
    features = output if isinstance(output, tuple) else (output,)
    return head_loss_and_weight(loss, head, features, output, target, examples=examples)


def add_gradients(total: Gradients, stages: Sequence[nn.Module], value: Tensor, weight: float) -> None:
    """Add `weight` times the derivatives of a loss."""
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    if not parameters or not value.requires_grad:
        return
    for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            seen = total.get(parameter)
            total[parameter] = weight * gradient if seen is None else seen.add_(gradient, alpha=weight)


def cosine(stage: nn.Module, one: Gradients, other: Gradients) -> float | None:
    """Of all parameters of a stage together, in float64."""
    shared = [p for p in stage.parameters() if p in one and p in other]
    if not shared:
        return None
    a, b = (torch.cat([each[p].flatten().double() for p in shared]) for each in (one, other))
    lengths = float(a.norm()) * float(b.norm())
    return float(a @ b) / lengths if lengths else None
