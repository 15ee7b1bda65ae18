"""Pooling of slabs: maximum, average, adaptive.

A pool whose output has one row along each cut axis is a global pool: every process gets its result, and the network
goes on replicated.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.parallel.space.convolution import Numbers, per_dim, spatial_dims
from stretto.parallel.space.exchange import Dims, add_up, fetch
from stretto.parallel.space.geometry import RowRange, SlidingWindow, cells, cuts, want
from stretto.parallel.space.halo import lines
from stretto.parallel.space.route import AxisRows
from stretto.parallel.space.slab import ImageCut, Slab, place_of_call, refuse, slab
from stretto.parallel.space.slab_shapes import collected

Func = Callable[..., Any]


def ends_space(cut: ImageCut, sizes: Sequence[int]) -> bool:
    """Whether an output of these sizes has one row along each axis that is really cut."""
    return all(size == 1 for size, parts in zip(sizes, cut.grid.parts, strict=True) if parts > 1)


def dims_of(func: Func) -> int:
    """How many spatial dims a function has, by the last digit of its name."""
    return next(int(letter) for letter in reversed(func.__name__) if letter.isdigit())


def pool_windows(
    input: Slab, count: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[SlidingWindow, ...]:
    """One window for each spatial dim, cut or not."""
    kernels = per_dim(kernel, count)
    strides = kernels if stride is None or stride in ((), []) else per_dim(stride, count)
    around, dilations = per_dim(padding, count), per_dim(dilation, count)
    return tuple(
        SlidingWindow(k, t, d, p, p, ceil) for k, t, d, p in zip(kernels, strides, dilations, around, strict=True)
    )


def max_pool(
    func: Func,
    input: Slab,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Beyond the border there is minus infinity."""
    if return_indices or func.__name__.endswith("_with_indices"):
        raise refuse(func, "indices of single elements have no meaning in a part of the image")
    count = dims_of(func)
    spatial_dims(func, input, count)
    windows = pool_windows(input, count, kernel_size, stride, padding, dilation, ceil_mode)
    cut = input.cut
    cut_windows = tuple(windows[dim] for dim in cut.dims)
    sizes = tuple(window.outputs(size) for window, size in zip(cut_windows, cut.sizes, strict=True))
    numbers = ([w.kernel for w in windows], [w.stride for w in windows], [w.before for w in windows])
    dilations = [w.dilation for w in windows]
    if ends_space(cut, sizes):
        return func(collected(input), *numbers, dilations, ceil_mode)
    made = cut.resized(sizes, f"{func.__name__} {place_of_call()}with kernel {kernel_size}")
    buffer = fetch(input, cut, lines(cut_windows, cut.sizes, cut.grid.parts), -math.inf)
    inner = [0 if at - count in cut.dims else amount for at, amount in enumerate(numbers[2])]
    return slab(func(buffer, *numbers[:2], inner, dilations, ceil_mode), made)


def average_pool(
    func: Func,
    input: Slab,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Sums over windows of a buffer padded with zeros, over how many each of them counts."""
    count = dims_of(func)
    spatial_dims(func, input, count)
    windows = pool_windows(input, count, kernel_size, stride, padding, 1, ceil_mode)
    cut = input.cut
    sizes = tuple(windows[dim].outputs(size) for dim, size in zip(cut.dims, cut.sizes, strict=True))
    if ends_space(cut, sizes):
        more = (divisor_override,) if count > 1 else ()
        return func(collected(input), kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
    made = cut.resized(sizes, f"{func.__name__} {place_of_call()}with kernel {kernel_size}")
    outs = [RowRange(0, window.outputs(size)) for window, size in zip(windows, input.shape[2:], strict=True)]
    whole = list(input.shape[2:])
    for dim, out, size in zip(cut.dims, made.spans, cut.sizes, strict=True):
        outs[dim], whole[dim] = out, size
    buffer = fetch(input, cut, lines(tuple(windows[dim] for dim in cut.dims), cut.sizes, cut.grid.parts))
    buffer = bordered(buffer, windows, cut.dims)
    kernels = [window.kernel for window in windows]
    mean = func(buffer, kernels, [window.stride for window in windows])
    area = math.prod(kernels)
    if divisor_override is not None:
        return slab(mean * (area / divisor_override), made)
    for at, (window, out, size) in enumerate(zip(windows, outs, whole, strict=True)):
        counted = [rows_counted(window, o, size, count_include_pad) for o in range(*out)]
        if any(number != window.kernel for number in counted):
            share = torch.tensor([window.kernel / number for number in counted], dtype=mean.dtype, device=mean.device)
            mean = mean * share.view(-1, *(1,) * (count - 1 - at))
    return slab(mean, made)


def bordered(buffer: Tensor, windows: tuple[SlidingWindow, ...], dims: Dims) -> Tensor:
    """Zeros around the dims that are not cut, as many as windows see."""
    around: list[int] = []
    for at in range(-1, -len(windows) - 1, -1):
        window, size = windows[at], buffer.size(at)
        hull = window.hull(RowRange(0, window.outputs(size)))
        around += [0, 0] if at in dims else [-hull.start, max(hull.stop - size, 0)]
    return F.pad(buffer, around) if any(around) else buffer


def rows_counted(window: SlidingWindow, o: int, size: int, include_pad: bool) -> int:
    """How many rows an average divides by; what a last window has beyond the padding never counts."""
    start = o * window.stride - window.before
    stop = min(start + window.kernel, size + window.after)
    return stop - start if include_pad else min(stop, size) - max(start, 0)


def adaptive_sizes(x: Slab, count: int, output_size: Any) -> Numbers:
    """The output's size along each spatial dim; None keeps the image's."""
    whole = x.cut.whole(x.shape)[-count:]
    return tuple(n if m is None else m for m, n in zip(per_dim(output_size, count), whole, strict=True))


def adaptive_average_pool(func: Func, input: Slab, output_size: Any) -> Any:
    """Averages over cells; over the whole image it is one sum over processes."""
    count = dims_of(func)
    spatial_dims(func, input, count)
    cut, sizes = input.cut, adaptive_sizes(input, count, output_size)
    if ends_space(cut, [sizes[dim] for dim in cut.dims]):
        local = math.prod(input.size(dim) for dim in cut.dims)
        return add_up(func(input, sizes) * (local / math.prod(cut.sizes)), cut.grid)
    buffer, made, inside = celled(func, input, sizes)
    local_sizes = list(sizes)
    for dim, spans in zip(cut.dims, inside, strict=True):
        local_sizes[dim] = len(spans)
        if len({span.size for span in spans}) > 1 or len(spans) * spans[0].size != buffer.size(dim):
            weights = buffer.new_zeros(len(spans), buffer.size(dim))
            for o, (start, stop) in enumerate(spans):
                weights[o, start:stop] = 1 / (stop - start)
            buffer = torch.tensordot(buffer, weights, dims=([dim], [1])).movedim(-1, dim)
    return slab(func(buffer, local_sizes), made)


def adaptive_max_pool(func: Func, input: Slab, output_size: Any, return_indices: bool = False) -> Any:
    """Maxima over cells: shorter cells repeat their last row, which wins no tie against itself."""
    if return_indices:
        raise refuse(func, "indices of single elements have no meaning in a part of the image")
    count = dims_of(func)
    spatial_dims(func, input, count)
    cut, sizes = input.cut, adaptive_sizes(input, count, output_size)
    if ends_space(cut, [sizes[dim] for dim in cut.dims]):
        return func(collected(input), sizes)
    buffer, made, inside = celled(func, input, sizes)
    local_sizes = list(sizes)
    for dim, spans in zip(cut.dims, inside, strict=True):
        local_sizes[dim] = len(spans)
        longest = max(span.size for span in spans)
        rows = [min(start + at, stop - 1) for start, stop in spans for at in range(longest)]
        if rows != list(range(buffer.size(dim))):
            buffer = buffer.index_select(dim, torch.tensor(rows, device=buffer.device))
    return slab(func(buffer, local_sizes), made)


def celled(func: Func, x: Slab, sizes: Numbers) -> tuple[Tensor, ImageCut, list[list[RowRange]]]:
    """The rows of this process's cells, the output's cut, and along each cut axis where in the buffer its cells lie."""
    cut, parts = x.cut, x.cut.grid.parts
    made = cut.resized(tuple(sizes[dim] for dim in cut.dims), f"{func.__name__} {place_of_call()}")
    every = [cells(size, count) for size, count in zip(cut.sizes, made.sizes, strict=True)]
    wanted = [[RowRange(axis[out.start].start, axis[out.stop - 1].stop) for out in cuts(len(axis), p)]
              for axis, p in zip(every, parts, strict=True)]  # fmt: skip
    wants = tuple(AxisRows(cuts(size, p), tuple(want(rows, size) for rows in axis))
                  for axis, size, p in zip(wanted, cut.sizes, parts, strict=True))  # fmt: skip
    inside = [[cell.seen_from(axis[at].start) for cell in all_cells[out.start : out.stop]]
              for all_cells, axis, at, out in zip(every, wanted, cut.grid.place, made.spans, strict=True)]  # fmt: skip
    return fetch(x, cut, wants), made, inside
