"""Functions that move, join and reduce dims. Shapes in their arguments are the image's, as the slab's own is."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.parallel.space.elementwise import common, localised, marked, uncut
from stretto.parallel.space.exchange import Collect, add_up, fetch
from stretto.parallel.space.geometry import SlidingWindow, cuts, want
from stretto.parallel.space.route import AxisRows
from stretto.parallel.space.slab import ImageCut, Slab, refuse, slab

Func = Callable[..., Any]


def collected(x: Slab) -> Tensor:
    """The whole image on every process, a plain tensor: from here on the network goes on replicated."""
    image: Tensor = Collect.apply(x, x.cut)  # type: ignore[no-untyped-call]
    return image


def size(func: Func, x: Slab, dim: int | None = None) -> Any:
    """The size of the whole image, along one dim or all."""
    whole = x.cut.whole(x.shape)
    return whole if dim is None else whole[dim]


def numel(func: Func, x: Slab) -> int:
    """How many elements the whole image has."""
    return x.cut.whole(x.shape).numel()


def length(func: Func, x: Slab) -> int:
    """The size of the whole image along its first dim."""
    return x.cut.whole(x.shape)[0]


def numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes or dims, given one by one or as one sequence."""
    if len(given) == 1 and isinstance(given[0], Sequence):
        return tuple(given[0])
    return tuple(given)


def permute(func: Func, x: Slab, *given: Any, dims: Any = None) -> Any:
    """The dims in another order."""
    order = tuple(dim % x.ndim for dim in numbers(given or (dims,)))
    moved = tuple(order.index(dim % x.ndim) - x.ndim for dim in x.cut.dims)
    return slab(torch.permute(x, order), ImageCut(x.cut.grid, moved, x.cut.sizes))


def transpose(func: Func, x: Slab, dim0: int, dim1: int) -> Any:
    """The image with two dims exchanged."""
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(func, x, order)


def view(func: Func, x: Slab, *given: Any, **kwargs: Any) -> Any:
    """Another shape of the image. Where that mixes cut dims with others, the image is collected first."""
    sizes = numbers(given or tuple(kwargs.values()))
    if sizes and not all(isinstance(each, int) for each in sizes):
        raise refuse(func, "only shapes are known here, not types")
    return reshaped(x, sizes)


def reshaped(x: Slab, sizes: Sequence[int]) -> Tensor:
    """`view` with the shape as a sequence."""
    whole = x.cut.whole(x.shape)
    if -1 in sizes:
        sizes = [whole.numel() // -math.prod(sizes) if each == -1 else each for each in sizes]
    local, dims = list(sizes), []
    for dim, all_rows in zip(x.cut.dims, x.cut.sizes, strict=True):
        before = math.prod(whole[: x.ndim + dim])
        fits = [at for at, each in enumerate(sizes) if each == all_rows and math.prod(sizes[:at]) == before]
        if not fits or math.prod(sizes) != whole.numel():
            return collected(x).reshape(*sizes)
        dims.append(fits[0] - len(sizes))
        local[fits[0]] = x.size(dim)
    return slab(x.reshape(local), ImageCut(x.cut.grid, tuple(dims), x.cut.sizes))


def flatten(func: Func, x: Slab, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Dims merged into one."""
    whole = list(x.cut.whole(x.shape))
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return reshaped(x, [*whole[:start], math.prod(whole[start : end + 1]), *whole[end + 1 :]])


def unsqueeze(func: Func, x: Slab, dim: int) -> Any:
    """A dim of size 1 more."""
    whole = list(x.cut.whole(x.shape))
    whole.insert(dim % (x.ndim + 1), 1)
    return reshaped(x, whole)


def pieces(func: Func, x: Slab, size: Any, dim: int = 0) -> Any:
    """chunk and split, along a dim that is not cut."""
    uncut(func, x, dim)
    return marked(func, func(x, size, dim), x.cut)


def joined(func: Func, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """cat, along a dim that is not cut."""
    cut = common(func, tensors)
    uncut(func, next(each for each in tensors if isinstance(each, Slab)), dim)
    return slab(torch.cat(localised(func, list(tensors), cut), dim), cut)


def stacked(func: Func, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """stack: a dim more, wherever it stands."""
    cut = common(func, tensors)
    result = torch.stack(localised(func, list(tensors), cut), dim)
    at = dim % result.ndim
    moved = tuple(each if result.ndim + each > at else each - 1 for each in cut.dims)
    return slab(result, ImageCut(cut.grid, moved, cut.sizes))


def getitem(func: Func, x: Slab, index: Any) -> Any:
    """Slices. Those of cut dims crop the image, and what is left is cut anew."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not all(each is Ellipsis or isinstance(each, (slice, int)) for each in given):
        raise refuse(func, "an index has to be made of slices and whole numbers")
    if Ellipsis in given:
        at = given.index(Ellipsis)
        given[at : at + 1] = [slice(None)] * (x.ndim - len(given) + 1)
    given += [slice(None)] * (x.ndim - len(given))
    cropped = x
    for axis, dim in enumerate(x.cut.dims):
        if not isinstance(given[dim], slice):
            raise refuse(func, f"dim {dim} is cut; take a slice of it")
        cropped = crop(func, cropped, axis, given[dim])
        given[dim] = slice(None)
    after = [sum(isinstance(each, int) for each in given[x.ndim + dim :]) for dim in x.cut.dims]
    moved = tuple(dim + gone for dim, gone in zip(x.cut.dims, after, strict=True))
    return slab(cropped[tuple(given)], ImageCut(x.cut.grid, moved, cropped.cut.sizes))


def crop(func: Func, x: Slab, axis: int, rows: slice) -> Slab:
    """Some rows of the image along one axis of the grid: a window of one row."""
    size = x.cut.sizes[axis]
    start, stop, step = rows.indices(size)
    if (start, stop, step) == (0, size, 1):
        return x
    window = SlidingWindow(1, stride=step, before=-start)
    count = len(range(start, stop, step))
    cut = x.cut.resized(tuple(count if at == axis else each for at, each in enumerate(x.cut.sizes)), "a slice")
    lines = tuple(
        AxisRows(cuts(before, parts), tuple(want(window.hull(out) if at == axis else out, before) for out in outs))
        for at, (before, parts) in enumerate(zip(x.cut.sizes, x.cut.grid.parts, strict=True))
        for outs in (cuts(count, parts) if at == axis else cuts(before, parts),)
    )
    rest: list[slice] = [slice(None)] * x.ndim
    rest[x.cut.dims[axis]] = slice(None, None, step)
    result = slab(fetch(x, x.cut, lines)[tuple(rest)], cut)
    assert isinstance(result, Slab)
    return result


def narrow(func: Func, x: Slab, dim: int, start: int, length: int) -> Any:
    """A slice by its length."""
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = slice(start, start + length)
    return getitem(func, x, tuple(index))


def reduced(func: Func, x: Slab, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """sum and mean. Over all cut dims: a global pool, whose result every process has."""
    every = tuple(range(-x.ndim, 0))
    dims = every if dim is None else tuple(each if each < 0 else each - x.ndim for each in numbers((dim,)))
    crossed = [each for each in x.cut.dims if each in dims]
    if not crossed:
        if keepdim:
            return slab(func(x, dims, True, dtype=dtype), x.cut)
        moved = tuple(each + sum(other > each for other in dims) for each in x.cut.dims)
        return slab(func(x, dims, False, dtype=dtype), ImageCut(x.cut.grid, moved, x.cut.sizes))
    if len(crossed) < len(x.cut.dims):
        raise refuse(func, f"of the cut dims {x.cut.dims} it reduces only {tuple(crossed)}; reduce all of them at once")
    total = add_up(torch.sum(x, dims, keepdim, dtype=dtype), x.cut.grid)
    if func.__name__ == "sum":
        return total
    whole = x.cut.whole(x.shape)
    return total / math.prod(whole[each] for each in dims)


def extreme(func: Func, x: Slab, dim: Any = (), keepdim: bool = False) -> Any:
    """amax and amin; across cut dims they need the whole image, since ties share the gradient."""
    dims = tuple(each if each < 0 else each - x.ndim for each in numbers((dim,))) or tuple(range(-x.ndim, 0))
    if any(each in x.cut.dims for each in dims):
        return func(collected(x), dims, keepdim)
    moved = tuple(each + (0 if keepdim else sum(other > each for other in dims)) for each in x.cut.dims)
    return slab(func(x, dims, keepdim), ImageCut(x.cut.grid, moved, x.cut.sizes))
