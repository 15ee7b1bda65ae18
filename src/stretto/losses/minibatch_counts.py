"""Turns gradients of sums into gradients of a minibatch's mean, by the counts of all its micro-batches and replicas.

A minibatch of one micro-batch is divided by its count before its backward. With several micro-batches that is too
early: under 1F1B the first backward runs before the last forward, so the total count is not known. Each micro-batch's
sum is divided by the count expected of the minibatch instead, and the update divides the accumulated gradients by
count / expected. This *divisor* travels down the pipeline with the gradients. The divisors of a minibatch add up: the
last micro-batch brings the whole value, the others bring 0.

    forward       0   1   2   3                         counts 5 + 7 + 2 + 6, expected 24
    divisor       0   0   0   20/24                     with the gradient of the last micro-batch
    update        gradients / (20/24)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.losses.cross_entropy import Sum, divided
from stretto.losses.value import Loss
from stretto.nn.sharded_modules import local_share

if TYPE_CHECKING:
    from stretto.replicas.agreement import Agreement

Gradient = tuple[Tensor | None, ...]  # one for each tensor of an activation


@dataclass(slots=True)
class Target:
    """The target of one micro-batch's loss, and the micro-batch's share of the minibatch's examples.

    `counted`: torch's own losses are to give a sum and a count. `expected` is an estimate of the whole minibatch's
    count, by which the sums of its micro-batches are divided at first. `check` is called with the loss, the output and
    its value.
    """

    value: Any
    share: float = 1.0
    inputs: tuple[Tensor, ...] = ()  # the model's inputs, where a head's loss uses them
    counted: bool = False
    expected: float = 1.0
    check: Callable[[Loss, Any, Tensor | Sum], None] | None = None


class MinibatchCounts:
    """The counts that one head collects over a minibatch of `per_update` micro-batches, in all replicas."""

    def __init__(self, per_update: int, agreement: "Agreement | None") -> None:
        self.per_update = per_update
        self._agreement = agreement
        self.forget()

    def forget(self) -> None:
        """Drop the counts of a minibatch that will not be completed."""
        self._counted: list[Tensor] = []

    def add(self, value: Sum, target: Target, stage: int, keeps_graph: bool, *, alone: bool) -> tuple[Tensor, Tensor]:
        """A micro-batch's loss to differentiate, and its part of the divisor of the update's gradients.

        The divisor is written in place, now or once all replicas' counts have arrived, but before the micro-batch's
        backward. `keeps_graph`: the backward uses this forward's graph. `alone`: the head has no further loss. Raises
        UsageError if it has one and the minibatch consists of several micro-batches.
        """
        divisor, whole = torch.zeros_like(value.count), value.count.clone()
        if self.per_update == 1:
            self._agree(whole, divisor, lambda: whole > 0, keeps_graph)
            return divided(value, whole, target.share), divisor
        if not alone:
            raise UsageError(
                f"the head of stage {stage} has a loss of its own beside one that returns (sum, count), and the method "
                "cuts minibatches into micro-batches: the two losses need different divisors. Use a method without "
                "microbatches=, another head, or a loss that is a mean over examples"
            )
        if keeps_graph:
            self._counted.append(value.count)
        if len(self._counted) == self.per_update:
            whole = torch.stack(self._counted).sum()
            self._counted = []
            self._agree(whole, divisor, lambda: whole / target.expected, keeps_graph)
        return value.total / target.expected, divisor

    def _agree(self, count: Tensor, divisor: Tensor, value: Callable[[], Tensor], keeps_graph: bool) -> None:
        # With an agreement, `count` holds the sum over all replicas when `set_divisor` is called.
        def set_divisor() -> None:
            divisor.copy_(value())

        if self._agreement is None or not keeps_graph:
            set_divisor()
        else:
            self._agreement.add_counts([count], set_divisor)


def shared_divisor(divisors: Sequence[Tensor | None], stage: int) -> Tensor | None:
    """The common divisor of gradients that several losses have added up; None if no loss returns sums.

    Divisors of 0 (no target counts) are skipped. Raises UsageError if the others differ: a sum of gradients has one
    divisor.
    """
    given = [divisor for divisor in divisors if divisor is not None]
    if len(given) < 2:
        return given[0] if given else None
    different = sorted({float(divisor) for divisor in given} - {0.0})
    if len(different) > 1:
        raise UsageError(
            f"stage {stage} is trained by several losses with different counts: {different} of the expected count. "
            "Gradients of a minibatch in several micro-batches are divided by one count: let every loss count the same "
            "targets, or use a method without microbatches="
        )
    return max(given, key=float)


def message(gradients: Sequence[Gradient], divisors: Sequence[Tensor | None]) -> tuple[tuple[Tensor | None, ...], ...]:
    """The message to the stage below: the gradients by stop, and, if losses return sums, their divisors by stop."""
    present = tuple(divisor for divisor in divisors if divisor is not None)
    assert len(present) in (0, len(gradients)), "either all losses return sums, or none does"
    return (*gradients, present) if present else tuple(gradients)


def divide(parameters: Sequence[Tensor], divisor: float) -> None:
    """Divide the parameters' gradients, in place; parameters without a gradient are skipped."""
    gradients = [local_share(parameter.grad) for parameter in parameters if parameter.grad is not None]
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:
        torch._foreach_div_(dense, divisor)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.div_(divisor)
