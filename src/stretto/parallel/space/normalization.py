"""Norms whose statistics are those of the whole image, over all processes.

In forward each process sends its slab's mean and variance, in one message: sums of plain squares would lose precision
in float32. In backward it sends two sums, which are the gradients of weight and bias and part of the input's gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.space.elementwise import per_channel, refuse_cut_dims
from stretto.parallel.space.exchange import with_summed_gradients
from stretto.parallel.space.slab import Grid, ImageCut, PlainTensors, Slab, slab

Func = Callable[..., Any]


class Normalized(torch.autograd.Function):
    """Batch normalization of x [N, C, ...] with the statistics of all processes; also returns mean and variance [C]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, grid: Grid, count: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = statistics(x, grid, count)
        ctx.grid, ctx.count, ctx.eps = grid, count, eps
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps))
        result = F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, variance)
        return result, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias, from two sums over processes."""
        with PlainTensors():
            x, weight, mean, inverse = ctx.saved_tensors
            gradient = gradients[0].contiguous()
            _, weight_gradient, bias_gradient = torch.ops.aten.native_batch_norm_backward(
                gradient, x, weight, None, None, mean, inverse, True, ctx.eps, [False, True, True]
            )
            weight_gradient, bias_gradient = ctx.grid.sum(weight_gradient, bias_gradient)
            shape = (1, -1, *(1,) * (x.ndim - 2))
            scale = inverse if weight is None else inverse * weight
            slope = -scale * inverse * weight_gradient / ctx.count
            shift = -scale * bias_gradient / ctx.count - slope * mean
            result = gradient * scale.to(x.dtype).view(shape)
            result.addcmul_(x, slope.to(x.dtype).view(shape)).add_(shift.to(x.dtype).view(shape))
            _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
            return (
                result,
                weight_gradient if needs_weight else None,
                bias_gradient if needs_bias else None,
                None,
                None,
                None,
            )


def statistics(x: Tensor, grid: Grid, count: int) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] over all processes (Chan, Golub, LeVeque 1979); a channel has `count` elements in all."""
    x_float = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    variance, mean = torch.var_mean(x_float, dims, correction=0)
    share = torch.full_like(mean, x.numel() / x.size(1) / count)
    shares, means, variances = grid.gather(torch.stack([share, mean, variance])).unbind(1)
    total_mean = (shares * means).sum(0)
    return total_mean, (shares * (variances + (means - total_mean) ** 2)).sum(0)


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, cut: ImageCut, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize x with the statistics of all processes: the result, mean and variance [C]."""
    result: tuple[Tensor, Tensor, Tensor] = Normalized.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, cut.grid, count, eps
    )
    return result


def update_running(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Move a running average, in place, towards a batch's value."""
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
    """Batch normalization with statistics of the whole image and batch; running averages are alike on all processes."""
    refuse_cut_dims(func, input, 0, 1)
    if not training:
        return per_channel(func, input, running_mean, running_var, weight, bias, False, momentum, eps)
    cut = input.cut
    whole = cut.whole(input.shape)
    count = whole.numel() // whole[1]
    result, mean, variance = normalized(input, weight, bias, cut, count, eps)
    update_running(running_mean, mean, momentum)
    update_running(running_var, variance * (count / (count - 1)), momentum)
    return slab(result, cut)


def group_norm(
    func: Func,
    input: Slab,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Group normalization: each group of each example is taken as a channel of a batch of one."""
    refuse_cut_dims(func, input, 0, 1)
    result, _, _ = normalized_groups(input, num_groups, eps)
    return slab(affine(input, result, weight, bias), input.cut)


def normalized_groups(x: Slab, num_groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x normalized without weights, and the mean and the variance [N * groups] of each example's groups."""
    count = math.prod(x.cut.whole(x.shape)[1:]) // num_groups
    rows = x.reshape(1, x.size(0) * num_groups, -1)
    result, mean, variance = normalized(rows, None, None, x.cut, count, eps)
    return result.view(x.shape), mean, variance * (count / max(count - 1, 1))


def affine(x: Slab, result: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The result times the weight of each channel, plus its bias."""
    weight, bias = with_summed_gradients(x.cut.grid, weight, bias)
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
    """Instance normalization: a group for each channel; running averages take the mean over examples, as torch's."""
    refuse_cut_dims(func, input, 0, 1)
    if not use_input_stats:
        return per_channel(F.batch_norm, input, running_mean, running_var, weight, bias, False, momentum, eps)
    result, mean, variance = normalized_groups(input, input.size(1), eps)
    update_running(running_mean, mean.view(input.size(0), -1).mean(0), momentum)
    update_running(running_var, variance.view(input.size(0), -1).mean(0), momentum)
    return slab(affine(input, result, weight, bias), input.cut)
