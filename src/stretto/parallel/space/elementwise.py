"""Functions that treat every element, or every pixel, alike: they run on slabs as they are.

A tensor that is not a slab is the same on every process. Where it is as large as the image its own rows are taken, and
the gradients that processes have for it are summed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from stretto.parallel.space.exchange import meet, part
from stretto.parallel.space.geometry import RowRange
from stretto.parallel.space.slab import ImageCut, Slab, refuse, slab

Func = Callable[..., Any]


def pointwise(func: Func, *args: Any, **kwargs: Any) -> Any:
    """Element by element, with broadcasting."""
    leaves, form = tree_flatten((args, kwargs))
    cut = common(func, leaves)
    args, kwargs = tree_unflatten(localised(func, leaves, cut), form)
    return marked(func, func(*args, **kwargs), cut, leaves)


def common(func: Func, leaves: Iterable[Any]) -> ImageCut:
    """The cut that all slabs among the arguments share."""
    slabs = [leaf for leaf in leaves if isinstance(leaf, Slab)]
    for other in slabs[1:]:
        if (other.cut.dims, other.cut.sizes) != (slabs[0].cut.dims, slabs[0].cut.sizes):
            shapes = [tuple(x.cut.whole(x.shape)) for x in (slabs[0], other)]
            raise refuse(func, f"it meets a slab that is cut otherwise: their images are {shapes[0]} and {shapes[1]}")
    return slabs[0].cut


def localised(func: Func, leaves: list[Any], cut: ImageCut) -> list[Any]:
    """The arguments with whole tensors replaced by what this process uses of them."""
    plain = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not isinstance(leaf, Slab)]
    if not plain:
        return leaves
    result = list(leaves)
    for at, tensor in zip(plain, meet(cut.grid, *(leaves[at] for at in plain)), strict=True):
        assert tensor is not None
        result[at] = own_rows(func, tensor, cut)
    return result


def own_rows(func: Func, tensor: Tensor, cut: ImageCut) -> Tensor:
    """This process's rows of a tensor that everybody has; all of it where it has one row for all."""
    for dim, size, span in zip(cut.dims, cut.sizes, cut.spans, strict=True):
        if tensor.ndim < -dim or tensor.size(dim) == 1:
            continue
        if tensor.size(dim) != size:
            raise refuse(func, f"a tensor of shape {tuple(tensor.shape)} fits no image of {size} rows along dim {dim}")
        tensor = part(tensor, (dim,), (RowRange(*span),))
    return tensor


def marked(func: Func, result: Any, cut: ImageCut, leaves: Iterable[Any] = ()) -> Any:
    """Make slabs of what a function returned, be it one tensor or several."""
    if isinstance(result, (tuple, list)):
        return type(result)(marked(func, member, cut, leaves) for member in result)
    if not isinstance(result, Tensor) or isinstance(result, Slab):
        return result
    if any(result is leaf for leaf in leaves):
        raise refuse(func, "it would write an image into a tensor that every process has")
    return slab(result, cut)


def alike(func: Func, x: Slab, *args: Any, **kwargs: Any) -> Any:
    """A tensor of the same shape, from one."""
    return marked(func, func(x, *args, **kwargs), x.cut)


def asked(func: Func, *args: Any, **kwargs: Any) -> Any:
    """What is no tensor and the same for a part."""
    return func(*args, **kwargs)


def along_dim(func: Func, x: Slab, *args: Any, **kwargs: Any) -> Any:
    """softmax and its like, along a dim that is not cut; `dim` is the first argument or named."""
    dim = kwargs.get("dim", args[0] if args else -1)
    if not isinstance(dim, int):
        raise refuse(func, "its dim has to be given, as a whole number")
    uncut(func, x, dim)
    return alike(func, x, *args, **kwargs)


def normalize(func: Func, x: Slab, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Any:
    """torch.nn.functional.normalize, whose dim is its third argument."""
    uncut(func, x, dim)
    return alike(func, x, p, dim, eps)


def uncut(func: Func, x: Slab, *dims: int) -> None:
    """Refuse dims that are cut."""
    for dim in dims:
        if (dim if dim < 0 else dim - x.ndim) in x.cut.dims:
            raise refuse(func, f"dim {dim} is cut, and no process has all of it")


def per_channel(func: Func, x: Slab, *args: Any, **kwargs: Any) -> Any:
    """Functions of each pixel that use weights, or other channels of the same pixel."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for at, tensor in zip(tensors, meet(x.cut.grid, *(leaves[at] for at in tensors)), strict=True):
        leaves[at] = tensor
    args, kwargs = tree_unflatten(leaves, form)
    return marked(func, func(x, *args, **kwargs), x.cut)


def linear(func: Func, x: Slab, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear layer over channels that stand last."""
    uncut(func, x, -1)
    return per_channel(func, x, weight, bias)


def layer_norm(func: Func, x: Slab, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Over dims that are not cut: channels that stand last."""
    uncut(func, x, *range(-len(normalized_shape), 0))
    return per_channel(func, x, normalized_shape, *args, **kwargs)


def dropout(func: Func, x: Slab, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """The mask of the whole image, of which each process uses its part.

    So a generator that stands alike on all processes draws what one device would draw, and stands alike afterwards:
    dropout behind a global pool has to be the same everywhere.
    """
    if not training or p == 0:
        return x
    mask = F.dropout(torch.ones(x.cut.whole(x.shape), dtype=x.dtype, device=x.device), p)
    mine = part(mask, x.cut.dims, x.cut.spans)
    return slab(x * mine, x.cut) if not inplace else x.mul_(mine)
