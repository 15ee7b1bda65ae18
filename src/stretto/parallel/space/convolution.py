"""Convolutions of slabs, plain and transposed, in one, two or three dimensions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.space.exchange import (
    Dims,
    add_gradients,
    block_of,
    fetch,
    resized,
    return_gradients,
    send_rows,
    with_summed_gradients,
)
from stretto.parallel.space.geometry import RowRange, SlidingWindow, TransposedWindow
from stretto.parallel.space.halo import Halo, Strip, axis_rows, halo
from stretto.parallel.space.slab import Grid, ImageCut, PlainTensors, Slab, place_of_call, refusal, slab

Func = Callable[..., Any]
Numbers = tuple[int, ...]

# Halos are added afterwards if they touch at most this share of a slab's outputs. On two CPU workers over loopback this
# saves 10 % of the time at 1/256; from 1/32 on, the extra thin convolutions cost as much as waiting and a copy do.
MAX_TOUCHED_SHARE = 1 / 32


def per_dim(value: Any, count: int) -> Numbers:
    """One number for each of `count` spatial dims, from one number for all or from one for each."""
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return numbers * count if len(numbers) == 1 else numbers


def check_dims(func: Func, x: Slab, count: int) -> None:
    """Refuse a slab that is not [N, C] and then `count` dims, the last ones cut."""
    if x.ndim != count + 2 or any(dim < -count for dim in x.cut.dims):
        raise refusal(
            func,
            f"it takes [N, C] and {count} spatial dims; this image is {tuple(x.cut.whole(x.shape))}, "
            f"cut along dims {x.cut.dims}",
        )


@dataclass(frozen=True)
class ConvolutionSettings:
    """The settings of a convolution, one number a spatial dim; `padded` sets the padding along cut dims."""

    stride: Numbers
    padding: Numbers
    dilation: Numbers
    groups: int

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve plain tensors with these settings."""
        zeros = (0,) * len(self.stride)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def gradients(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
        """The gradients of input, weight and bias; None for those that `wanted` leaves out."""
        zeros = [0] * len(self.stride)
        sizes = [weight.size(0)]
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, sizes, self.stride, self.padding, self.dilation, False, zeros, self.groups, wanted
        )

    def padded(self, dims: Dims, amounts: Numbers) -> "ConvolutionSettings":
        """The same settings with other paddings along the cut dims."""
        padding = list(self.padding)
        for dim, amount in zip(dims, amounts, strict=True):
            padding[dim] = amount
        return ConvolutionSettings(self.stride, tuple(padding), self.dilation, self.groups)


def convolution(
    func: Func,
    input: Slab,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """torch's conv1d, conv2d and conv3d on a slab; the output is a slab."""
    count = weight.ndim - 2
    check_dims(func, input, count)
    stride, dilation = per_dim(stride, count), per_dim(dilation, count)
    before, after = paddings(padding, weight.shape[2:], dilation)
    kernels = tuple(weight.shape[2:])
    cut, dims = input.cut, input.cut.dims
    every = convolution_windows(kernels, stride, dilation, (before, after))
    windows = tuple(every[d] for d in dims)
    where = f"{func.__name__} {place_of_call()}with kernel {kernels}"
    sizes = tuple(window.outputs(size) for window, size in zip(windows, cut.sizes, strict=True))
    output_cut = cut.resized(sizes, where)
    x: Tensor = input
    if any(before[d] != after[d] for d in range(-count, 0) if d not in dims):
        around = [0 if d in dims else side[d] for d in range(-1, -count - 1, -1) for side in (before, after)]
        x, before = F.pad(input, around), (0,) * count
    settings = ConvolutionSettings(stride, before, dilation, groups)
    x, weight, bias = cast_alike(x, weight, bias)
    return slab(convolved(x, weight, bias, settings, windows, cut), output_cut)


def convolution_windows(
    kernels: Numbers, stride: Any, dilation: Any, around: tuple[Numbers, Numbers]
) -> tuple[SlidingWindow, ...]:
    """The windows of a convolution, one for each spatial dim, cut or not."""
    per_axis = (kernels, per_dim(stride, len(kernels)), per_dim(dilation, len(kernels)), *around)
    return tuple(SlidingWindow(k, t, d, p, q) for k, t, d, p, q in zip(*per_axis, strict=True))


def paddings(padding: Any, kernels: tuple[int, ...], dilation: Numbers) -> tuple[Numbers, Numbers]:
    """The padding before and after, one number a dim; `padding` is a word, one number or one a dim."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernels, strict=True)]
        return tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return (both := per_dim(padding, len(kernels))), both


def cast_alike(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors in the dtype that autocast would give them, where it is on."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device_type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
    windows: tuple[SlidingWindow, ...],
    cut: ImageCut,
) -> Tensor:
    """A slab convolved: halos are added afterwards if all processes can, otherwise they are fetched first."""
    grid = cut.grid
    plan = halo(windows, cut.sizes, grid.parts, grid.place, MAX_TOUCHED_SHARE)
    if plan is not None:
        result: Tensor = HaloConvolution.apply(x, weight, bias, settings, plan, cut)  # type: ignore[no-untyped-call]
        return result
    buffer = fetch(x, cut, axis_rows(windows, cut.sizes, grid.parts))
    shared_weight, shared_bias = with_summed_gradients(grid, weight, bias)
    assert shared_weight is not None
    return settings.padded(cut.dims, (0,) * len(cut.dims)).run(buffer, shared_weight, shared_bias)


class HaloConvolution(torch.autograd.Function):
    """A convolution of the slab's own rows, to which the halos' share is added.

    Halos are under way while the slab is computed. In backward the gradients of the halos, which are thin, are computed
    first and are under way while those of the slab are computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: ConvolutionSettings,
        plan: Halo,
        cut: ImageCut,
    ) -> Tensor:
        """Convolve the slab while halos are under way, then add their share."""
        ctx.settings, ctx.plan, ctx.cut = settings, plan, cut
        transit = send_rows(cut.grid, x, cut.dims, plan.exchange)
        result = settings.padded(cut.dims, plan.padding).run(x, weight, bias)
        arrived = transit.wait()
        unpadded = settings.padded(cut.dims, (0,) * len(cut.dims))
        strips = [strip_buffer(x, cut.dims, strip, arrived) for strip in plan.strips]
        for strip, buffer in zip(plan.strips, strips, strict=True):
            block_of(result, cut.dims, strip.outs).add_(unpadded.run(buffer, weight, None))
        ctx.save_for_backward(x, weight, *strips)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with PlainTensors():
            return halo_convolution_backward(ctx, *gradients)


def strip_buffer(like: Tensor, dims: Dims, strip: Strip, arrived: list[Tensor]) -> Tensor:
    """The input buffer of a strip: its halo's rows, zero elsewhere."""
    buffer = like.new_zeros(resized(like, dims, strip.shape))
    for index, block in zip(strip.boxes, strip.at, strict=True):
        block_of(buffer, dims, block).copy_(arrived[index])
    return buffer


def halo_convolution_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The backward of `HaloConvolution`: halos first, then the slab while their gradients are under way."""
    x, weight, *strips = ctx.saved_tensors
    settings, plan, cut = ctx.settings, ctx.plan, ctx.cut
    grid: Grid = cut.grid
    wanted = ctx.needs_input_grad[:3]
    unpadded = settings.padded(cut.dims, (0,) * len(cut.dims))
    halo_gradients: list[Tensor | None] = [None] * len(plan.exchange.receives)
    strip_weight_gradients: list[Tensor] = []
    for strip, buffer in zip(plan.strips, strips, strict=True):
        output_gradient = block_of(gradient, cut.dims, strip.outs)
        buffer_gradient, weight_gradient, _ = unpadded.gradients(
            output_gradient, buffer, weight, (wanted[0], wanted[1], False)
        )
        for index, block in zip(strip.boxes, strip.at, strict=True) if wanted[0] else ():
            halo_gradients[index] = block_of(buffer_gradient, cut.dims, block).contiguous()
        strip_weight_gradients += [weight_gradient] if wanted[1] else []
    sent = [tensor for tensor in halo_gradients if tensor is not None]
    transit = return_gradients(grid, x, cut.dims, plan.exchange, sent) if wanted[0] else None
    slab_gradients = settings.padded(cut.dims, plan.padding).gradients(gradient, x, weight, wanted)
    input_gradient, *local_gradients = slab_gradients
    for weight_gradient in strip_weight_gradients:
        local_gradients[0].add_(weight_gradient)
    summed = iter(grid.sum(*(tensor for tensor, needed in zip(local_gradients, wanted[1:], strict=True) if needed)))
    parameter_gradients = [next(summed) if needed else None for needed in wanted[1:]]
    if transit is not None:
        add_gradients(input_gradient, cut.dims, plan.exchange, transit)
    return input_gradient, *parameter_gradients, None, None, None


def transposed(
    func: Func,
    input: Slab,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """conv_transpose1d, 2d, 3d on a slab: of the input rows that add to this process's outputs; the rest is cropped."""
    count = weight.ndim - 2
    check_dims(func, input, count)
    stride, padding, dilation = per_dim(stride, count), per_dim(padding, count), per_dim(dilation, count)
    extra = per_dim(output_padding, count)
    cut, grid = input.cut, input.cut.grid
    every = transposed_windows(tuple(weight.shape[2:]), stride, dilation, padding, extra)
    windows = tuple(every[d] for d in cut.dims)
    sizes = tuple(window.outputs(size) for window, size in zip(windows, cut.sizes, strict=True))
    output_cut = cut.resized(sizes, f"{func.__name__} {place_of_call()}with kernel {tuple(weight.shape[2:])}")
    buffer = fetch(input, cut, axis_rows(windows, cut.sizes, grid.parts))
    shared_weight, shared_bias = with_summed_gradients(grid, weight, bias)
    assert shared_weight is not None
    uncut_padding = tuple(0 if d in cut.dims else padding[d] for d in range(-count, 0))
    uncut_extra = tuple(0 if d in cut.dims else extra[d] for d in range(-count, 0))
    result = torch.convolution(buffer, shared_weight, None, stride, uncut_padding, dilation, True, uncut_extra, groups)
    for dim, window, size, out in zip(cut.dims, windows, cut.sizes, output_cut.spans, strict=True):
        result = cropped_or_padded(result, dim, window.covered(window.needed(out, size)), out)
    if shared_bias is not None:
        result = result + shared_bias.view(-1, *(1,) * count)
    return slab(result, output_cut)


def transposed_windows(
    kernels: Numbers, stride: Any, dilation: Any, padding: Any, extra: Any
) -> tuple[TransposedWindow, ...]:
    """The windows of a transposed convolution, one for each spatial dim, cut or not."""
    per_axis = (kernels, *(per_dim(value, len(kernels)) for value in (stride, dilation, padding, extra)))
    return tuple(TransposedWindow(k, t, d, p, e) for k, t, d, p, e in zip(*per_axis, strict=True))


def cropped_or_padded(x: Tensor, dim: int, rows: RowRange, target: RowRange) -> Tensor:
    """x, whose rows along `dim` are `rows`, cropped and padded with zeros to the rows `target`."""
    kept = rows.intersection(target)
    if not kept.size:
        x, around = x.narrow(dim, 0, 0), (0, target.size)
    else:
        x = x.narrow(dim, kept.start - rows.start, kept.size)
        around = (kept.start - target.start, target.stop - kept.stop)
    if around == (0, 0):
        return x
    return F.pad(x, [0, 0] * (-dim - 1) + list(around))
