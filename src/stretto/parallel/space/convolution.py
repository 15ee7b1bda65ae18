"""Convolutions of slabs, plain and transposed, in one, two or three dimensions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.space.exchange import Dims, add_back, depart, fetch, give_back, meet, part, resized
from stretto.parallel.space.geometry import RowRange, SlidingWindow, Spread, cuts, want
from stretto.parallel.space.grid import Grid
from stretto.parallel.space.halo import Halo, Strip, halo, lines
from stretto.parallel.space.route import AxisRows
from stretto.parallel.space.slab import ImageCut, Plainly, Slab, place_of_call, refuse, slab

Func = Callable[..., Any]
Numbers = tuple[int, ...]

# The largest share of a slab's outputs that halos may touch for them to be added afterwards: on two CPU workers over
# loopback that saves 10 % at 1/256 and nothing from 1/32 on, where thin convolutions cost what waiting and a copy do.
THIN = 1 / 32


def per_dim(value: Any, count: int) -> Numbers:
    """One number a spatial dim, given as one for all or one for each."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return given * count if len(given) == 1 else given


def spatial_dims(func: Func, x: Slab, count: int) -> None:
    """Refuse a slab that is not [N, C] and then `count` dims, the last ones cut."""
    if x.ndim != count + 2 or any(dim < -count for dim in x.cut.dims):
        raise refuse(func, f"it wants [N, C] and {count} dims; this image is {tuple(x.cut.whole(x.shape))}, cut along "
                           f"dims {x.cut.dims}")  # fmt: skip


@dataclass(frozen=True)
class ConvolutionSettings:
    """A convolution's own settings, one number a spatial dim; `padding` is that of the dims that are not cut."""

    stride: Numbers
    padding: Numbers
    dilation: Numbers
    groups: int

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve plain tensors with these settings."""
        zeros = (0,) * len(self.stride)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def gradients(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
        """Of input, weight and bias."""
        zeros = [0] * len(self.stride)
        sizes = [weight.size(0)]
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, sizes, self.stride, self.padding, self.dilation, False, zeros, self.groups, wanted
        )

    def padded(self, dims: Dims, amounts: Numbers) -> "ConvolutionSettings":
        """The same with another padding along the cut dims."""
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
    """torch's conv1d, conv2d and conv3d on a slab; the output is a slab, too."""
    count = weight.ndim - 2
    spatial_dims(func, input, count)
    stride, dilation = per_dim(stride, count), per_dim(dilation, count)
    before, after = paddings(padding, weight.shape[2:], dilation)
    kernels = tuple(weight.shape[2:])
    cut, dims = input.cut, input.cut.dims
    windows = tuple(SlidingWindow(kernels[d], stride[d], dilation[d], before[d], after[d]) for d in dims)
    where = f"{func.__name__} {place_of_call()}with kernel {kernels}"
    sizes = tuple(window.outputs(size) for window, size in zip(windows, cut.sizes, strict=True))
    made = cut.resized(sizes, where)
    x: Tensor = input
    if any(before[d] != after[d] for d in range(-count, 0) if d not in dims):
        around = [0 if d in dims else side[d] for d in range(-1, -count - 1, -1) for side in (before, after)]
        x, before = F.pad(input, around), (0,) * count
    settings = ConvolutionSettings(stride, before, dilation, groups)
    x, weight, cast = cast_alike(x, weight, bias)
    return slab(convolved(x, weight, cast, settings, windows, cut), made)


def paddings(padding: Any, kernels: tuple[int, ...], dilation: Numbers) -> tuple[Numbers, Numbers]:
    """Padding before and after: a word, one number or one for each dim."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernels, strict=True)]
        return tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return (both := per_dim(padding, len(kernels))), both


def cast_alike(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would do."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    lower = torch.get_autocast_dtype(kind)
    return x.to(lower), weight.to(lower), None if bias is None else bias.to(lower)


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
    windows: tuple[SlidingWindow, ...],
    cut: ImageCut,
) -> Tensor:
    """Halos added where that suits every process, else one buffer with everything that is needed."""
    grid = cut.grid
    plan = halo(windows, cut.sizes, grid.parts, grid.place, THIN)
    if plan is not None:
        result: Tensor = Added.apply(x, weight, bias, settings, plan, cut)  # type: ignore[no-untyped-call]
        return result
    buffer = fetch(x, cut, lines(windows, cut.sizes, grid.parts))
    met_weight, met_bias = meet(grid, weight, bias)
    assert met_weight is not None
    return settings.padded(cut.dims, (0,) * len(cut.dims)).run(buffer, met_weight, met_bias)


class Added(torch.autograd.Function):
    """A convolution of own rows, to which the halos' part is added.

    Halos travel while the slab is computed. In backward the gradients of halos, which are thin, are computed first and
    travel while those of the slab are.
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
        """Compute the slab while halos travel."""
        ctx.settings, ctx.plan, ctx.cut = settings, plan, cut
        transit = depart(cut.grid, x, cut.dims, plan.way)
        result = settings.padded(cut.dims, plan.padding).run(x, weight, bias)
        arrived = transit.wait()
        thin = settings.padded(cut.dims, (0,) * len(cut.dims))
        strips = [assembled(x, cut.dims, strip, arrived) for strip in plan.strips]
        for strip, buffer in zip(plan.strips, strips, strict=True):
            part(result, cut.dims, strip.outs).add_(thin.run(buffer, weight, None))
        ctx.save_for_backward(x, weight, *strips)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients; see `backward`."""
        with Plainly():
            return backward(ctx, *gradients)


def assembled(like: Tensor, dims: Dims, strip: Strip, arrived: list[Tensor]) -> Tensor:
    """The buffer of a strip."""
    buffer = like.new_zeros(resized(like, dims, strip.shape))
    for index, block in zip(strip.boxes, strip.at, strict=True):
        part(buffer, dims, block).copy_(arrived[index])
    return buffer


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of `Added`."""
    x, weight, *strips = ctx.saved_tensors
    settings, plan, cut = ctx.settings, ctx.plan, ctx.cut
    grid: Grid = cut.grid
    wanted = ctx.needs_input_grad[:3]
    thin = settings.padded(cut.dims, (0,) * len(cut.dims))
    leaving: list[Tensor | None] = [None] * len(plan.way.receives)
    of_weight: list[Tensor] = []
    for strip, buffer in zip(plan.strips, strips, strict=True):
        above = part(gradient, cut.dims, strip.outs)
        back, mine, _ = thin.gradients(above, buffer, weight, (wanted[0], wanted[1], False))
        for index, block in zip(strip.boxes, strip.at, strict=True) if wanted[0] else ():
            leaving[index] = part(back, cut.dims, block).contiguous()
        of_weight += [mine] if wanted[1] else []
    sent = [each for each in leaving if each is not None]
    transit = give_back(grid, x, cut.dims, plan.way, sent) if wanted[0] else None
    own = settings.padded(cut.dims, plan.padding).gradients(gradient, x, weight, wanted)
    for mine in of_weight:
        own[1].add_(mine)
    summed = iter(grid.sum(*(each for each, needed in zip(own[1:], wanted[1:], strict=True) if needed)))
    of_parameters = [next(summed) if needed else None for needed in wanted[1:]]
    if transit is not None:
        add_back(own[0], cut.dims, plan.way, transit)
    return own[0], *of_parameters, None, None, None


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
    """conv_transpose1d, 2d, 3d: the inputs that reach this process's outputs, spread, and what lies beyond cut off."""
    count = weight.ndim - 2
    spatial_dims(func, input, count)
    stride, padding, dilation = per_dim(stride, count), per_dim(padding, count), per_dim(dilation, count)
    extra = per_dim(output_padding, count)
    cut, grid = input.cut, input.cut.grid
    spreads = tuple(Spread(weight.size(2 + count + d), stride[d], dilation[d], padding[d], extra[d]) for d in cut.dims)
    sizes = tuple(spread.outputs(size) for spread, size in zip(spreads, cut.sizes, strict=True))
    made = cut.resized(sizes, f"{func.__name__} {place_of_call()}with kernel {tuple(weight.shape[2:])}")
    needed = [[source(spread, out, size) for out in cuts(total, parts)]
              for spread, size, total, parts in zip(spreads, cut.sizes, sizes, grid.parts, strict=True)]  # fmt: skip
    wanted = tuple(AxisRows(cuts(size, parts), tuple(want(rows, size) for rows in axis))
                   for axis, size, parts in zip(needed, cut.sizes, grid.parts, strict=True))  # fmt: skip
    buffer = fetch(input, cut, wanted)
    met_weight, met_bias = meet(grid, weight, bias)
    assert met_weight is not None
    inner = tuple(0 if d in cut.dims else padding[d] for d in range(-count, 0))
    more = tuple(0 if d in cut.dims else extra[d] for d in range(-count, 0))
    result = torch.convolution(buffer, met_weight, None, stride, inner, dilation, True, more, groups)
    for dim, spread, axis, at, out in zip(cut.dims, spreads, needed, grid.place, made.spans, strict=True):
        result = framed(result, dim, spread.covered(axis[at]), out)
    if met_bias is not None:
        result = result + met_bias.view(-1, *(1,) * count)
    return slab(result, made)


def source(spread: Spread, out: RowRange, size: int) -> RowRange:
    """The input rows for a range of outputs; at least one, so that there is something to compute with."""
    rows = spread.hull(out).both(RowRange(0, size))
    if rows.size:
        return rows
    nearest = min(max(rows.start, 0), size - 1)
    return RowRange(nearest, nearest + 1)


def framed(x: Tensor, dim: int, have: RowRange, wanted: RowRange) -> Tensor:
    """Rows `have` of something as rows `wanted` of it: cropped, and zero where there is nothing."""
    kept = have.both(wanted)
    if not kept.size:
        kept = RowRange(have.start, have.start)
        x, around = x.narrow(dim, 0, 0), (0, wanted.size)
    else:
        x = x.narrow(dim, kept.start - have.start, kept.size)
        around = (kept.start - wanted.start, wanted.stop - kept.stop)
    if around == (0, 0):
        return x
    return F.pad(x, [0, 0] * (-dim - 1) + list(around))
