"""The input and output of a cut pair (column, then row): whole activations, or this process's part of the sequence.

The second is sequence parallelism (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4.2): each process computes and keeps only its tokens of the norms, dropouts and residuals between
pairs, and of the input of a pair.

Linear layers on a gathered sequence keep only this process's part of it in their autograd graph. The gathered input is
as large as without sequence parallelism. So it is dropped after the forward, and gathered again in backward for the
gradients of the weights (section 4.2.2), once for all columns of a pair.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.nn.devices import autocasts
from stretto.parallel.operator.axis import Axis, enter, gather, join, leave, part, scatter_sum


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


@dataclass(frozen=True, eq=False)
class WholeActivations:
    """Pairs take and return the same whole activations on every process."""

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        """The input of columns, unchanged; its gradient is summed over processes."""
        return enter(x, self.axis)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column's output from an input that `enter` returned."""
        return F.linear(x, weight, bias)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over processes of the partial sums of a row."""
        return leave(x, self.axis)

    def used(self, parameter: Tensor) -> Tensor:
        """A parameter used on whole activations, unchanged: its gradient is whole on every process."""
        return parameter


@dataclass(eq=False)
class SequenceParts:
    """Pairs take and return activations [N, T, D] (or [T, N, D], or [T, D]) cut along T, as torch.tensor_split cuts.

    One object serves all blocks that pass parts to each other. `cut` sets `sizes`, the tokens of each process in the
    forward that runs now. `running` is true while the container of the blocks runs. `gathered` is the input of the
    pair that runs now, between `enter` and `leave`.
    """

    axis: Axis
    batch_first: bool = True
    sizes: tuple[int, ...] = ()
    running: bool = False
    gathered: GatheredSequence | None = None

    def dim(self, x: Tensor) -> int:
        """The sequence dim of x."""
        return x.ndim - 2 if self.batch_first or x.ndim == 2 else 0

    def cut(self, x: Tensor) -> Tensor:
        """This process's tokens of a whole activation; starts a forward with a sequence of its length."""
        self.sizes = self.axis.cuts(x.size(self.dim(x)))
        self.gathered = None
        return part(x, self.axis, self.dim(x), self.sizes)

    def whole(self, x: Tensor) -> Tensor:
        """The whole activation, gathered for a module that every process runs alike."""
        return join(x, self.axis, self.dim(x), self.sizes)

    def enter(self, x: Tensor) -> Tensor:
        """The whole input of a pair's columns, gathered once for all of them: later calls return x."""
        if self.gathered is not None:
            return x
        self.gathered = GatheredSequence(x, self.axis, self.dim(x), self.sizes)
        return self.gathered.whole

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column's output from an input that `enter` returned.

        Its graph keeps this process's part of x only, if x is the gathered tensor itself and autocast is off.
        """
        if self.gathered is None or x is not self.gathered.whole or autocasts(x.device):
            return F.linear(x, weight, bias)
        return self.gathered.linear(weight, bias)

    def leave(self, x: Tensor) -> Tensor:
        """This process's tokens of the sum over processes of the partial sums of a row."""
        assert self.gathered is not None
        self.gathered = None
        return scatter_sum(x, self.axis, self.dim(x), self.sizes)

    def used(self, parameter: Tensor) -> Tensor:
        """A parameter used on parts of the sequence: its gradient is summed over processes."""
        return enter(parameter, self.axis) if parameter.requires_grad and torch.is_grad_enabled() else parameter


Boundary = WholeActivations | SequenceParts
