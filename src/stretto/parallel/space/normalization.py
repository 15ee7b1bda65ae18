"""Norms over a whole image whose parts lie on several processes.

Each process sends the mean and the sum of squares about it of its own part (one message; sums of plain squares would
cancel in float32), and in backward the two sums that a norm's gradient needs, which are also those of weight and bias.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.space.elementwise import per_channel, uncut
from stretto.parallel.space.exchange import meet
from stretto.parallel.space.grid import Grid
from stretto.parallel.space.slab import ImageCut, Plainly, Slab, slab

Func = Callable[..., Any]


class Normalized(torch.autograd.Function):
    """Batch normalization of x [N, C, ...] with the statistics of all processes; also returns mean and variance [C]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, grid: Grid, count: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the statistics of all processes and normalize with them."""
        mean, variance = statistics(x, grid, count)
        ctx.grid, ctx.count, ctx.eps = grid, count, eps
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps))
        result = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, variance)
        return result, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Sum what the gradient needs."""
        with Plainly():
            x, weight, mean, inverse = ctx.saved_tensors
            gradient = gradients[0].contiguous()
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, x, weight, None, None, mean, inverse, True, ctx.eps, [False, True, True]
            )
            of_weight, of_bias = ctx.grid.sum(of_weight, of_bias)
            shape = (1, -1, *(1,) * (x.ndim - 2))
            scale = inverse if weight is None else inverse * weight
            slope = -scale * inverse * of_weight / ctx.count
            shift = -scale * of_bias / ctx.count - slope * mean
            result = gradient * scale.to(x.dtype).view(shape)
            result.addcmul_(x, slope.to(x.dtype).view(shape)).add_(shift.to(x.dtype).view(shape))
            wanted = ctx.needs_input_grad
            return result, of_weight if wanted[1] else None, of_bias if wanted[2] else None, None, None, None


def statistics(x: Tensor, grid: Grid, count: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel over all processes (Chan, Golub, LeVeque 1979); `count` numbers in all."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    variance, mean = torch.var_mean(wide, dims, correction=0)
    share = torch.full_like(mean, x.numel() / x.size(1) / count)
    shares, means, variances = grid.gather(torch.stack([share, mean, variance])).unbind(1)
    total = (shares * means).sum(0)
    return total, (shares * (variances + (means - total) ** 2)).sum(0)


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, cut: ImageCut, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize x with the statistics of all processes: the result, mean and variance [C]."""
    made: tuple[Tensor, Tensor, Tensor] = Normalized.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, cut.grid, count, eps
    )
    return made


def track(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Move a running average towards a batch's value."""
    if running is not None:
        with torch.no_grad():
            running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def batch_norm(
    func: Func,
    input: Slab,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Statistics of the whole image and batch; running averages are the same on every process."""
    uncut(func, input, 0, 1)
    if not training:
        return per_channel(func, input, running_mean, running_var, weight, bias, False, momentum, eps)
    cut = input.cut
    whole = cut.whole(input.shape)
    count = whole.numel() // whole[1]
    result, mean, variance = normalized(input, weight, bias, cut, count, eps)
    track(running_mean, mean, momentum)
    track(running_var, variance * (count / (count - 1)), momentum)
    return slab(result, cut)


def group_norm(
    func: Func,
    input: Slab,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Each group of each example is a channel of a batch of one."""
    uncut(func, input, 0, 1)
    result, _, _ = by_group(input, num_groups, eps)
    return slab(affine(input, result, weight, bias), input.cut)


def by_group(x: Slab, num_groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalized without weights; mean and variance of each example's groups."""
    count = math.prod(x.cut.whole(x.shape)[1:]) // num_groups
    rows = x.reshape(1, x.size(0) * num_groups, -1)
    result, mean, variance = normalized(rows, None, None, x.cut, count, eps)
    return result.view(x.shape), mean, variance * (count / max(count - 1, 1))


def affine(x: Slab, result: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Weight and bias of each channel."""
    weight, bias = meet(x.cut.grid, weight, bias)
    shape = (-1, *(1,) * (x.ndim - 2))
    if weight is not None:
        result = result * weight.view(shape)
    return result if bias is None else result + bias.view(shape)


def instance_norm(
    func: Func,
    input: Slab,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """A group for each channel; running averages take the mean over examples, as torch's do."""
    uncut(func, input, 0, 1)
    if not use_input_stats:
        return per_channel(F.batch_norm, input, running_mean, running_var, weight, bias, False, momentum, eps)
    result, mean, variance = by_group(input, input.size(1), eps)
    track(running_mean, mean.view(input.size(0), -1).mean(0), momentum)
    track(running_var, variance.view(input.size(0), -1).mean(0), momentum)
    return slab(affine(input, result, weight, bias), input.cut)
