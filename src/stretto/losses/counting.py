"""How gradients of sums become those of a minibatch's mean: by the counts of all its micro-batches and replicas.

A minibatch in one micro-batch is divided by its count before its backward. One in several is not: under 1F1B the first
backward runs before the last forward. Its sums are divided by what the whole is expected to count, and gradients by the
rest, count over expected, at the update. That *divisor* goes down the pipeline with the gradients of its micro-batch:
each adds a part, and the last one, when all are counted, the whole of it.

    forward       0   1   2   3                         counts 5 + 7 + 2 + 6, expected 24
    divisor       0   0   0   20/24                     with the gradient of the last micro-batch
    update        gradients / (20/24)
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.losses.sums import Sum, divided
from stretto.nn.sharded_modules import local

if TYPE_CHECKING:
    from stretto.replicas.agreement import Agreement
    from stretto.stage.stage import Gradient, Target


class Counting:
    """What one head counts of a minibatch of `per_update` micro-batches, and of its parts in other replicas."""

    def __init__(self, per_update: int, agreement: "Agreement | None") -> None:
        self.per_update = per_update
        self._agreement = agreement
        self.forget()

    def forget(self) -> None:
        """What has been counted of a minibatch will not be completed."""
        self._counted: list[Tensor] = []

    def add(self, value: Sum, target: "Target", stage: int, keeps_graph: bool, *, alone: bool) -> tuple[Tensor, Tensor]:
        """A micro-batch's loss to differentiate, and its part of the divisor of the update's gradients.

        The divisor may be told later, in place, but before the micro-batch's backward. `keeps_graph`: the forward is
        the one that its backward uses. `alone`: the head has no further losses. Raises UsageError where it has, and the
        minibatch comes in several micro-batches.
        """
        divisor, whole = torch.zeros_like(value.count), value.count.clone()
        if self.per_update == 1:
            self._agree(whole, divisor, lambda: whole > 0, keeps_graph)
            return divided(value, whole, target.share), divisor
        if not alone:
            raise UsageError(
                f"the head of stage {stage} has a loss of its own beside one that returns (sum, count), and the method "
                "cuts minibatches into micro-batches: their sums cannot be divided alike. Use a method without "
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
        # Once the count is that of all replicas, the divisor gets its value.
        def tell() -> None:
            divisor.copy_(value())

        if self._agreement is None or not keeps_graph:
            tell()
        else:
            self._agreement.add_counts([count], tell)


def shared_divisor(divisors: Sequence[Tensor | None], stage: int) -> Tensor | None:
    """The divisor of gradients that several losses have made together; None where no loss gives sums.

    Losses of which nothing counts have no part in it. Raises UsageError for different ones: the sum of gradients cannot
    be divided by both.
    """
    given = [divisor for divisor in divisors if divisor is not None]
    if len(given) < 2:
        return given[0] if given else None
    different = sorted({float(divisor) for divisor in given} - {0.0})
    if len(different) > 1:
        raise UsageError(
            f"stage {stage} is trained by several losses, whose counts are not alike: {different} of what was "
            "expected. Gradients of a minibatch in several micro-batches are divided by one count: let the loss count "
            "targets alone, or use a method without microbatches="
        )
    return max(given, key=float)


def message(
    gradients: "Sequence[Gradient]", divisors: Sequence[Tensor | None]
) -> tuple[tuple[Tensor | None, ...], ...]:
    """What goes to the stage below: gradients by stop, and, where losses give sums, their divisors by stop."""
    told = tuple(divisor for divisor in divisors if divisor is not None)
    assert len(told) in (0, len(gradients)), "either all losses give sums, or none does"
    return (*gradients, told) if told else tuple(gradients)


def divide(parameters: Sequence[Tensor], divisor: float) -> None:
    """Divide what the parameters have of gradients, in place."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:
        torch._foreach_div_(dense, divisor)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.div_(divisor)
