"""Activations pass between whole tensors and parts: collectives, each with the backward that sums gradients once.

| function      | forward        | backward       | used                                                            |
|---------------|----------------|----------------|-----------------------------------------------------------------|
| `enter`       | identity       | all-reduce     | before weights that this process alone has                      |
| `leave`       | all-reduce     | identity       | behind such weights: partial sums become the whole activation   |
| `join`        | all-gather     | own part       | parts along a dim become a whole that all processes use alike   |
| `part`        | own part       | all-gather     | the inverse of `join`                                           |
| `gather`      | all-gather     | reduce-scatter | as `enter`, from parts of the sequence                          |
| `scatter_sum` | reduce-scatter | all-gather     | as `leave`, to parts of the sequence                            |

So whole activations have whole gradients, and a part has its part of the gradient.

A tensor subclass may answer for an exchange as for any of torch's functions (`__torch_function__`): slabs of images do
(`parallel/space`), so that processes which hold the same rows exchange channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from stretto.parallel.operator.axis import Axis

Exchange = Callable[[Tensor, int, tuple[int, ...]], Tensor]  # a method of Axis: tensor, dim, size on each process


class Enter(torch.autograd.Function):
    """Identity; backward is an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Return a view: autograd wants an output that is not its input."""
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient, summed over processes."""
        return ctx.axis.sum(gradients[0]), None


class Leave(torch.autograd.Function):
    """All-reduce; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """The sum of x over processes."""
        return axis.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient, unchanged."""
        return gradients[0], None


class AlongDim(torch.autograd.Function):
    """An exchange along a dim, and another for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, reverse: Exchange, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Exchange x along `dim`."""
        ctx.reverse, ctx.dim, ctx.sizes = reverse, dim, sizes
        return exchange(x, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange the gradient along `dim`."""
        return ctx.reverse(gradients[0], ctx.dim, ctx.sizes), None, None, None, None


def enter(x: Tensor, axis: Axis) -> Tensor:
    """A whole activation, about to be used with weights that this process alone has: its gradient is summed."""
    if has_torch_function_unary(x):
        return handle_torch_function(enter, (x,), x, axis)
    entered: Tensor = Enter.apply(x, axis)  # type: ignore[no-untyped-call]
    return entered


def leave(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over processes."""
    if has_torch_function_unary(x):
        return handle_torch_function(leave, (x,), x, axis)
    total: Tensor = Leave.apply(x, axis)  # type: ignore[no-untyped-call]
    return total


def join(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """The whole, gathered along `dim`, to be used alike on every process."""
    if has_torch_function_unary(x):
        return handle_torch_function(join, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.join, axis.part, dim, sizes)


def part(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """This process's part of a whole along `dim`."""
    if has_torch_function_unary(x):
        return handle_torch_function(part, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.part, axis.join, dim, sizes)


def gather(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """The whole, gathered along `dim`, to be used with weights that this process alone has."""
    if has_torch_function_unary(x):
        return handle_torch_function(gather, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.join, axis.part_of_sum, dim, sizes)


def scatter_sum(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """This process's part, along `dim`, of the sum of x over processes."""
    if has_torch_function_unary(x):
        return handle_torch_function(scatter_sum, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.part_of_sum, axis.join, dim, sizes)


def along_dim(x: Tensor, exchange: Exchange, reverse: Exchange, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Exchange x along `dim`, and its gradient by `reverse`."""
    exchanged: Tensor = AlongDim.apply(x, exchange, reverse, dim, sizes)  # type: ignore[no-untyped-call]
    return exchanged
