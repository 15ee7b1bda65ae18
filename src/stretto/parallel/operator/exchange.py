"""Where activations pass from whole to parts and back, and what autograd must know of it.

What every process has alike and then uses with weights of its own has a gradient that is a sum: `enter`. Partial sums
become the same value everywhere: `leave`. Parts along a dim become the whole, and the other way round: `join`, `part`.
Where activations stay parts in between, parts become the whole that meets weights of its own: `gather`; partial sums
become parts of the sum: `spread`. Each is the other's backward, so a gradient is summed exactly once, whole activations
have whole gradients, and parts have their part of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.parallel.operator.axis import Axis

Way = Callable[[Tensor, int, tuple[int, ...]], Tensor]  # of an Axis: a tensor, a dim, how much of it each process has


class Enter(torch.autograd.Function):
    """As it is; backward sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Pass a view on, for autograd to see."""
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of the gradients of all processes."""
        return ctx.axis.sum(gradients[0]), None


class Leave(torch.autograd.Function):
    """Sums; backward is as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """The sum of what each process has."""
        return axis.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient on."""
        return gradients[0], None


class Along(torch.autograd.Function):
    """Something that processes do along a dim; backward does what belongs to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Exchange along `dim` by the method `there`."""
        ctx.back, ctx.dim, ctx.sizes = back, dim, sizes
        return there(x, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange the gradient along `dim` by the method `back`."""
        return ctx.back(gradients[0], ctx.dim, ctx.sizes), None, None, None, None


def enter(x: Tensor, axis: Axis) -> Tensor:
    """What every process has, to be used with weights that it alone has."""
    entered: Tensor = Enter.apply(x, axis)  # type: ignore[no-untyped-call]
    return entered


def leave(x: Tensor, axis: Axis) -> Tensor:
    """The sum of what each process has."""
    total: Tensor = Leave.apply(x, axis)  # type: ignore[no-untyped-call]
    return total


def join(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """The whole, along `dim`."""
    return along(x, axis.join, axis.part, dim, sizes)


def part(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """This process's part, along `dim`."""
    return along(x, axis.part, axis.join, dim, sizes)


def gather(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """The whole, along `dim`, to be used with weights that this process alone has."""
    return along(x, axis.join, axis.part_of_sum, dim, sizes)


def spread(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """This process's part, along `dim`, of the sum of what each process has."""
    return along(x, axis.part_of_sum, axis.join, dim, sizes)


def along(x: Tensor, there: Way, back: Way, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """One way, and the gradient the other."""
    arrived: Tensor = Along.apply(x, there, back, dim, sizes)  # type: ignore[no-untyped-call]
    return arrived
