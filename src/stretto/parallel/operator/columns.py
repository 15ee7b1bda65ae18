"""Linear layers on a gathered sequence whose graph keeps this process's part of it only.

The gathered input is as large as without sequence parallelism. So it is dropped, and gathered again when the gradient
of a weight needs it (Korthikanti et al. 2022, section 4.2.2); once for all columns of a pair.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.exchange import gather


class Gathered:
    """A sequence gathered for the columns of a pair."""

    def __init__(self, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> None:
        self.part, self.whole = x.detach(), gather(x, axis, dim, sizes)
        self.again = Again(axis, dim, sizes)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What a column makes of the whole."""
        out: Tensor = Column.apply(self.whole, self.part, weight, bias, self.again)  # type: ignore[no-untyped-call]
        return out


class Again:
    """The same in the backward: there from its first use to its last."""

    def __init__(self, axis: Axis, dim: int, sizes: tuple[int, ...]) -> None:
        self.axis, self.dim, self.sizes = axis, dim, sizes
        self.uses = self.left = 0
        self.whole: Tensor | None = None

    def of(self, part: Tensor) -> Tensor:
        """Gather, if nobody has."""
        if self.whole is None:
            self.whole, self.left = self.axis.join(part, self.dim, self.sizes), self.uses
        whole, self.left = self.whole, self.left - 1
        if self.left == 0:
            self.whole = None
        return whole


class Column(torch.autograd.Function):
    """A linear layer on the whole, of which the graph keeps a part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, again: Again) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        ctx.save_for_backward(part, weight)
        ctx.again = again
        again.uses += ctx.needs_input_grad[2]
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Those of the whole, the weight and the bias."""
        part, weight = ctx.saved_tensors
        of_whole, _, of_weight, of_bias, _ = ctx.needs_input_grad
        outputs = gradients[0].flatten(0, -2)
        return (
            gradients[0] @ weight if of_whole else None,
            None,
            outputs.T @ ctx.again.of(part).flatten(0, -2) if of_weight else None,
            outputs.sum(0) if of_bias else None,
            None,
        )
