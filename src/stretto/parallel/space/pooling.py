"""Pooling of slabs: maximum, average, adaptive.

A pool whose output has one row along each cut axis is a global pool: every process gets its result, and the network
is replicated from there on.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.parallel.space.convolution import Numbers, check_dims, per_dim
from stretto.parallel.space.exchange import Dims, add_up, fetch
from stretto.parallel.space.geometry import CellWindow, RowRange, SlidingWindow, cells
from stretto.parallel.space.halo import axis_rows
from stretto.parallel.space.slab import ImageCut, Slab, place_of_call, refusal, slab
from stretto.parallel.space.slab_shapes import collected

Func = Callable[..., Any]


def is_global(cut: ImageCut, sizes: Sequence[int]) -> bool:
    """Whether an output of these sizes has one row along each axis with more than one part."""
    return all(size == 1 for size, parts in zip(sizes, cut.grid.parts, strict=True) if parts > 1)


def dims_of(func: Func) -> int:
    """The number of a function's spatial dims: the last digit in its name."""
    return next(int(letter) for letter in reversed(func.__name__) if letter.isdigit())


def pool_windows(
    input: Slab, count: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[SlidingWindow, ...]:
    """The windows of a pool, one for each spatial dim, cut or not."""
    kernels = per_dim(kernel, count)
    strides = kernels if stride is None or stride in ((), []) else per_dim(stride, count)
    paddings, dilations = per_dim(padding, count), per_dim(dilation, count)
    return tuple(
        SlidingWindow(k, t, d, p, p, ceil) for k, t, d, p in zip(kernels, strides, dilations, paddings, strict=True)
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
    """torch's max_pool1d, 2d, 3d on a slab; rows beyond the border are minus infinity."""
    if return_indices or func.__name__.endswith("_with_indices"):
        raise refusal(func, "indices of single elements have no meaning in a part of the image")
    count = dims_of(func)
    check_dims(func, input, count)
    windows = pool_windows(input, count, kernel_size, stride, padding, dilation, ceil_mode)
    cut = input.cut
    cut_windows = tuple(windows[dim] for dim in cut.dims)
    sizes = tuple(window.outputs(size) for window, size in zip(cut_windows, cut.sizes, strict=True))
    kernels, strides = [window.kernel for window in windows], [window.stride for window in windows]
    paddings, dilations = [window.before for window in windows], [window.dilation for window in windows]
    if is_global(cut, sizes):
        return func(collected(input), kernels, strides, paddings, dilations, ceil_mode)
    output_cut = cut.resized(sizes, f"{func.__name__} {place_of_call()}with kernel {kernel_size}")
    buffer = fetch(input, cut, axis_rows(cut_windows, cut.sizes, cut.grid.parts), -math.inf)
    uncut_paddings = [0 if at - count in cut.dims else padding for at, padding in enumerate(paddings)]
    return slab(func(buffer, kernels, strides, uncut_paddings, dilations, ceil_mode), output_cut)


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
    """torch's avg_pool1d, 2d, 3d on a slab: means over a buffer padded with zeros, corrected near the border.

    Each mean is multiplied, axis by axis, by the window's size over the rows that torch counts.
    """
    count = dims_of(func)
    check_dims(func, input, count)
    windows = pool_windows(input, count, kernel_size, stride, padding, 1, ceil_mode)
    cut = input.cut
    sizes = tuple(windows[dim].outputs(size) for dim, size in zip(cut.dims, cut.sizes, strict=True))
    if is_global(cut, sizes):
        divisor = (divisor_override,) if count > 1 else ()
        return func(collected(input), kernel_size, stride, padding, ceil_mode, count_include_pad, *divisor)
    output_cut = cut.resized(sizes, f"{func.__name__} {place_of_call()}with kernel {kernel_size}")
    outs = [RowRange(0, window.outputs(size)) for window, size in zip(windows, input.shape[2:], strict=True)]
    whole = list(input.shape[2:])
    for dim, out, size in zip(cut.dims, output_cut.spans, cut.sizes, strict=True):
        outs[dim], whole[dim] = out, size
    buffer = fetch(input, cut, axis_rows(tuple(windows[dim] for dim in cut.dims), cut.sizes, cut.grid.parts))
    buffer = pad_uncut_dims(buffer, windows, cut.dims)
    kernels = [window.kernel for window in windows]
    mean = func(buffer, kernels, [window.stride for window in windows])
    area = math.prod(kernels)
    if divisor_override is not None:
        return slab(mean * (area / divisor_override), output_cut)
    for at, (window, out, size) in enumerate(zip(windows, outs, whole, strict=True)):
        counts = [rows_counted(window, row, size, count_include_pad) for row in range(*out)]
        if any(rows != window.kernel for rows in counts):
            factor = torch.tensor([window.kernel / rows for rows in counts], dtype=mean.dtype, device=mean.device)
            mean = mean * factor.view(-1, *(1,) * (count - 1 - at))
    return slab(mean, output_cut)


def pad_uncut_dims(buffer: Tensor, windows: tuple[SlidingWindow, ...], dims: Dims) -> Tensor:
    """The buffer with zeros around the dims that are not cut, as many as the windows see."""
    around: list[int] = []
    for at in range(-1, -len(windows) - 1, -1):
        window, size = windows[at], buffer.size(at)
        hull = window.hull(RowRange(0, window.outputs(size)))
        around += [0, 0] if at in dims else [-hull.start, max(hull.stop - size, 0)]
    return F.pad(buffer, around) if any(around) else buffer


def rows_counted(window: SlidingWindow, row: int, size: int, include_pad: bool) -> int:
    """The number of rows that the mean of an output row divides by; rows beyond the padding never count."""
    start = row * window.stride - window.before
    stop = min(start + window.kernel, size + window.after)
    return stop - start if include_pad else min(stop, size) - max(start, 0)


def adaptive_sizes(x: Slab, count: int, output_size: Any) -> Numbers:
    """The output's size along each spatial dim; None stands for the image's size."""
    whole = x.cut.whole(x.shape)[-count:]
    return tuple(n if m is None else m for m, n in zip(per_dim(output_size, count), whole, strict=True))


def adaptive_average_pool(func: Func, input: Slab, output_size: Any) -> Any:
    """torch's adaptive_avg_pool1d, 2d, 3d on a slab: means over cells; over the whole image, one all-reduce."""
    count = dims_of(func)
    check_dims(func, input, count)
    cut, sizes = input.cut, adaptive_sizes(input, count, output_size)
    if is_global(cut, [sizes[dim] for dim in cut.dims]):
        local = math.prod(input.size(dim) for dim in cut.dims)
        return add_up(func(input, sizes) * (local / math.prod(cut.sizes)), cut.grid)
    buffer, output_cut, local_cells = fetch_cells(func, input, sizes)
    local_sizes = list(sizes)
    for dim, dim_cells in zip(cut.dims, local_cells, strict=True):
        local_sizes[dim] = len(dim_cells)
        if len({cell.size for cell in dim_cells}) > 1 or len(dim_cells) * dim_cells[0].size != buffer.size(dim):
            weights = buffer.new_zeros(len(dim_cells), buffer.size(dim))
            for row, (start, stop) in enumerate(dim_cells):
                weights[row, start:stop] = 1 / (stop - start)
            buffer = torch.tensordot(buffer, weights, dims=([dim], [1])).movedim(-1, dim)
    return slab(func(buffer, local_sizes), output_cut)


def adaptive_max_pool(func: Func, input: Slab, output_size: Any, return_indices: bool = False) -> Any:
    """torch's adaptive_max_pool1d, 2d, 3d on a slab: maxima over cells, made equally long.

    Shorter cells repeat their last row: torch gives the gradient to the first maximum, so a repeated row gets none.
    """
    if return_indices:
        raise refusal(func, "indices of single elements have no meaning in a part of the image")
    count = dims_of(func)
    check_dims(func, input, count)
    cut, sizes = input.cut, adaptive_sizes(input, count, output_size)
    if is_global(cut, [sizes[dim] for dim in cut.dims]):
        return func(collected(input), sizes)
    buffer, output_cut, local_cells = fetch_cells(func, input, sizes)
    local_sizes = list(sizes)
    for dim, dim_cells in zip(cut.dims, local_cells, strict=True):
        local_sizes[dim] = len(dim_cells)
        longest = max(cell.size for cell in dim_cells)
        rows = [min(start + at, stop - 1) for start, stop in dim_cells for at in range(longest)]
        if rows != list(range(buffer.size(dim))):
            buffer = buffer.index_select(dim, torch.tensor(rows, device=buffer.device))
    return slab(func(buffer, local_sizes), output_cut)


def fetch_cells(func: Func, x: Slab, sizes: Numbers) -> tuple[Tensor, ImageCut, list[list[RowRange]]]:
    """A buffer with the rows of this process's cells, the output's cut, and each cell's rows in the buffer.

    The cells are listed along each cut axis.
    """
    cut, parts = x.cut, x.cut.grid.parts
    output_cut = cut.resized(tuple(sizes[dim] for dim in cut.dims), f"{func.__name__} {place_of_call()}")
    windows = tuple(map(CellWindow, output_cut.sizes))
    all_cells = [cells(size, count) for size, count in zip(cut.sizes, output_cut.sizes, strict=True)]
    local_cells = [
        [cell.relative_to(window.rows(out, size).start) for cell in axis[out.start : out.stop]]
        for axis, window, out, size in zip(all_cells, windows, output_cut.spans, cut.sizes, strict=True)
    ]
    return fetch(x, cut, axis_rows(windows, cut.sizes, parts)), output_cut, local_cells
