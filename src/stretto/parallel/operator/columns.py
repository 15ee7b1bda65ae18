"""Linear layers on a gathered sequence: their autograd graph keeps only this process's part of it.

The gathered input is as large as without sequence parallelism. So it is dropped after the forward, and gathered again
in backward for the gradients of the weights (Korthikanti et al. 2022, section 4.2.2), once for all columns of a pair.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.exchange import gather


class GatheredSequence:
    """A sequence gathered for the columns of a pair."""

    def __init__(self, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> None:
        self.part, self.whole = x.detach(), gather(x, axis, dim, sizes)
        self.regathered = RegatheredSequence(axis, dim, sizes)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column's output from the whole sequence."""
        output: Tensor = ColumnProduct.apply(  # type: ignore[no-untyped-call]
            self.whole, self.part, weight, bias, self.regathered
        )
        return output


class RegatheredSequence:
    """The whole sequence in backward: gathered by the first column that needs it, freed after the last."""

    def __init__(self, axis: Axis, dim: int, sizes: tuple[int, ...]) -> None:
        self.axis, self.dim, self.sizes = axis, dim, sizes
        self.uses = self.uses_left = 0
        self.whole: Tensor | None = None

    def of(self, part: Tensor) -> Tensor:
        """The whole sequence, gathered from `part` unless another column has done so."""
        if self.whole is None:
            self.whole, self.uses_left = self.axis.join(part, self.dim, self.sizes), self.uses
        whole, self.uses_left = self.whole, self.uses_left - 1
        if self.uses_left == 0:
            self.whole = None
        return whole


class ColumnProduct(torch.autograd.Function):
    """A linear layer on the whole sequence; the graph keeps this process's part of the sequence."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, regathered: RegatheredSequence
    ) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        ctx.save_for_backward(part, weight)
        ctx.regathered = regathered
        regathered.uses += ctx.needs_input_grad[2]
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the whole sequence, the weight and the bias."""
        part, weight = ctx.saved_tensors
        needs_whole, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        output_gradients = gradients[0].flatten(0, -2)
        return (
            gradients[0] @ weight if needs_whole else None,
            None,
            output_gradients.T @ ctx.regathered.of(part).flatten(0, -2) if needs_weight else None,
            output_gradients.sum(0) if needs_bias else None,
            None,
        )
