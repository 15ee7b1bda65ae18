"""Functions that move, join, slice and reduce dims. Sizes and indices in their arguments are those of the image."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.parallel.space.elementwise import as_slabs, common_cut, local_arguments, refuse_cut_dims
from stretto.parallel.space.exchange import Collect, add_up, fetch
from stretto.parallel.space.geometry import SlidingWindow, cuts, want
from stretto.parallel.space.halo import AxisRows
from stretto.parallel.space.slab import ImageCut, Slab, refusal, slab

Func = Callable[..., Any]


def collected(x: Slab) -> Tensor:
    """The whole image on every process, as a plain tensor: the network is replicated from here on."""
    image: Tensor = Collect.apply(x, x.cut)  # type: ignore[no-untyped-call]
    return image


def size(func: Func, x: Slab, dim: int | None = None) -> Any:
    """The size of the whole image, along one dim or all."""
    whole = x.cut.whole(x.shape)
    return whole if dim is None else whole[dim]


def numel(func: Func, x: Slab) -> int:
    """The number of elements of the whole image."""
    return x.cut.whole(x.shape).numel()


def length(func: Func, x: Slab) -> int:
    """The size of the whole image along its first dim."""
    return x.cut.whole(x.shape)[0]


def as_tuple(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes or dims as a tuple, from separate arguments or from one sequence."""
    if len(args) == 1 and isinstance(args[0], Sequence):
        return tuple(args[0])
    return tuple(args)


def permute(func: Func, x: Slab, *args: Any, dims: Any = None) -> Any:
    order = tuple(dim % x.ndim for dim in as_tuple(args or (dims,)))
    moved = tuple(order.index(dim % x.ndim) - x.ndim for dim in x.cut.dims)
    return slab(torch.permute(x, order), ImageCut(x.cut.grid, moved, x.cut.sizes))


def transpose(func: Func, x: Slab, dim0: int, dim1: int) -> Any:
    """The image with two dims exchanged."""
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(func, x, order)


def view(func: Func, x: Slab, *args: Any, **kwargs: Any) -> Any:
    """The image in another shape. Where that merges or splits cut dims, the image is collected first."""
    sizes = as_tuple(args or tuple(kwargs.values()))
    if sizes and not all(isinstance(size, int) for size in sizes):
        raise refusal(func, "it takes shapes only, no dtype")
    return reshaped(x, sizes)


def reshaped(x: Slab, sizes: Sequence[int]) -> Tensor:
    """`view` with the shape as a sequence."""
    whole = x.cut.whole(x.shape)
    if -1 in sizes:
        sizes = [whole.numel() // -math.prod(sizes) if size == -1 else size for size in sizes]
    local, dims = list(sizes), []
    for dim, rows in zip(x.cut.dims, x.cut.sizes, strict=True):
        before = math.prod(whole[: x.ndim + dim])
        matches = [at for at, size in enumerate(sizes) if size == rows and math.prod(sizes[:at]) == before]
        if not matches or math.prod(sizes) != whole.numel():
            return collected(x).reshape(*sizes)
        dims.append(matches[0] - len(sizes))
        local[matches[0]] = x.size(dim)
    return slab(x.reshape(local), ImageCut(x.cut.grid, tuple(dims), x.cut.sizes))


def flatten(func: Func, x: Slab, start_dim: int = 0, end_dim: int = -1) -> Any:
    """The image with a range of dims merged into one."""
    whole = list(x.cut.whole(x.shape))
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return reshaped(x, [*whole[:start], math.prod(whole[start : end + 1]), *whole[end + 1 :]])


def unsqueeze(func: Func, x: Slab, dim: int) -> Any:
    """The image with a new dim of size 1."""
    whole = list(x.cut.whole(x.shape))
    whole.insert(dim % (x.ndim + 1), 1)
    return reshaped(x, whole)


def pieces(func: Func, x: Slab, size: Any, dim: int = 0) -> Any:
    """chunk and split, along a dim that is not cut."""
    refuse_cut_dims(func, x, dim)
    return as_slabs(func, func(x, size, dim), x.cut)


def joined(func: Func, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """cat, along a dim that is not cut."""
    cut = common_cut(func, tensors)
    refuse_cut_dims(func, next(tensor for tensor in tensors if isinstance(tensor, Slab)), dim)
    return slab(torch.cat(local_arguments(func, list(tensors), cut), dim), cut)


def stacked(func: Func, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """stack, along a new dim at any place."""
    cut = common_cut(func, tensors)
    result = torch.stack(local_arguments(func, list(tensors), cut), dim)
    at = dim % result.ndim
    moved = tuple(dim if result.ndim + dim > at else dim - 1 for dim in cut.dims)
    return slab(result, ImageCut(cut.grid, moved, cut.sizes))


def getitem(func: Func, x: Slab, index: Any) -> Any:
    """An index of slices and ints. A slice of a cut dim crops the image, and the cropped image is cut anew."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is Ellipsis or isinstance(entry, (slice, int)) for entry in entries):
        raise refusal(func, "an index may have slices and ints only")
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        entries[at : at + 1] = [slice(None)] * (x.ndim - len(entries) + 1)
    entries += [slice(None)] * (x.ndim - len(entries))
    cropped = x
    for axis, dim in enumerate(x.cut.dims):
        if not isinstance(entries[dim], slice):
            raise refusal(func, f"dim {dim} is cut: index it with a slice")
        cropped = crop(func, cropped, axis, entries[dim])
        entries[dim] = slice(None)
    ints_behind = [sum(isinstance(entry, int) for entry in entries[x.ndim + dim :]) for dim in x.cut.dims]
    moved = tuple(dim + num_ints for dim, num_ints in zip(x.cut.dims, ints_behind, strict=True))
    return slab(cropped[tuple(entries)], ImageCut(x.cut.grid, moved, cropped.cut.sizes))


def crop(func: Func, x: Slab, axis: int, rows: slice) -> Slab:
    """A slice of the image along one axis of the grid, as a window of kernel 1."""
    size = x.cut.sizes[axis]
    start, stop, step = rows.indices(size)
    if (start, stop, step) == (0, size, 1):
        return x
    window = SlidingWindow(1, stride=step, before=-start)
    count = len(range(start, stop, step))
    cut = x.cut.resized(tuple(count if at == axis else size for at, size in enumerate(x.cut.sizes)), "a slice")
    axis_rows = tuple(
        AxisRows(cuts(size, parts), tuple(want(window.hull(out) if at == axis else out, size) for out in outs))
        for at, (size, parts) in enumerate(zip(x.cut.sizes, x.cut.grid.parts, strict=True))
        for outs in (cuts(count, parts) if at == axis else cuts(size, parts),)
    )
    steps: list[slice] = [slice(None)] * x.ndim
    steps[x.cut.dims[axis]] = slice(None, None, step)
    result = slab(fetch(x, x.cut, axis_rows)[tuple(steps)], cut)
    assert isinstance(result, Slab)
    return result


def narrow(func: Func, x: Slab, dim: int, start: int, length: int) -> Any:
    """A slice along `dim`, given by its length."""
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = slice(start, start + length)
    return getitem(func, x, tuple(index))


def negative_dims(x: Slab, dim: Any) -> tuple[int, ...]:
    """One dim or a sequence of dims, counted from the end."""
    return tuple(dim if dim < 0 else dim - x.ndim for dim in as_tuple((dim,)))


def reduced(func: Func, x: Slab, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """sum and mean. Over all cut dims this is a global pool: every process gets the result, as a plain tensor."""
    dims = tuple(range(-x.ndim, 0)) if dim is None else negative_dims(x, dim)
    cut_dims = [dim for dim in x.cut.dims if dim in dims]
    if not cut_dims:
        if keepdim:
            return slab(func(x, dims, True, dtype=dtype), x.cut)
        moved = tuple(dim + sum(other > dim for other in dims) for dim in x.cut.dims)
        return slab(func(x, dims, False, dtype=dtype), ImageCut(x.cut.grid, moved, x.cut.sizes))
    if len(cut_dims) < len(x.cut.dims):
        raise refusal(
            func, f"of the cut dims {x.cut.dims} it reduces only {tuple(cut_dims)}: reduce all of them at once"
        )
    total = add_up(torch.sum(x, dims, keepdim, dtype=dtype), x.cut.grid)
    if func.__name__ == "sum":
        return total
    whole = x.cut.whole(x.shape)
    return total / math.prod(whole[dim] for dim in dims)


def extreme(func: Func, x: Slab, dim: Any = (), keepdim: bool = False) -> Any:
    """amax and amin; over cut dims the image is collected first, since equal extremes share the gradient."""
    dims = negative_dims(x, dim) or tuple(range(-x.ndim, 0))
    if any(dim in x.cut.dims for dim in dims):
        return func(collected(x), dims, keepdim)
    moved = tuple(dim + (0 if keepdim else sum(other > dim for other in dims)) for dim in x.cut.dims)
    return slab(func(x, dims, keepdim), ImageCut(x.cut.grid, moved, x.cut.sizes))
