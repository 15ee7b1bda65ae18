"""Functions of each element, or of each pixel: they run on slabs without messages.

A tensor argument that is not a slab is the same on every process. Where it has the image's size, each process uses the
rows of its slab, and the tensor's gradients are summed over processes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from stretto.parallel.space.exchange import block_of, with_summed_gradients
from stretto.parallel.space.geometry import RowRange
from stretto.parallel.space.slab import ImageCut, Slab, refusal, slab

Func = Callable[..., Any]


def pointwise(func: Func, *args: Any, **kwargs: Any) -> Any:
    """Any function that works element by element, with broadcasting."""
    leaves, form = tree_flatten((args, kwargs))
    cut = common_cut(func, leaves)
    args, kwargs = tree_unflatten(local_arguments(func, leaves, cut), form)
    return as_slabs(func, func(*args, **kwargs), cut, leaves)


def common_cut(func: Func, leaves: Iterable[Any]) -> ImageCut:
    """The cut of all slabs among the arguments. Raises UsageError if their cuts differ."""
    slabs = [leaf for leaf in leaves if isinstance(leaf, Slab)]
    for other in slabs[1:]:
        if (other.cut.dims, other.cut.sizes) != (slabs[0].cut.dims, slabs[0].cut.sizes):
            shapes = [tuple(x.cut.whole(x.shape)) for x in (slabs[0], other)]
            raise refusal(func, f"its slabs are cut differently: their images are {shapes[0]} and {shapes[1]}")
    return slabs[0].cut


def local_arguments(func: Func, leaves: list[Any], cut: ImageCut) -> list[Any]:
    """The arguments, with whole tensors replaced by the rows that this process uses of them."""
    plain = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not isinstance(leaf, Slab)]
    if not plain:
        return leaves
    result = list(leaves)
    for at, tensor in zip(plain, with_summed_gradients(cut.grid, *(leaves[at] for at in plain)), strict=True):
        assert tensor is not None
        result[at] = own_rows(func, tensor, cut)
    return result


def own_rows(func: Func, tensor: Tensor, cut: ImageCut) -> Tensor:
    """This process's rows of a whole tensor; all of it along dims that it broadcasts."""
    for dim, size, rows in zip(cut.dims, cut.sizes, cut.spans, strict=True):
        if tensor.ndim < -dim or tensor.size(dim) == 1:
            continue
        if tensor.size(dim) != size:
            raise refusal(func, f"a tensor of shape {tuple(tensor.shape)} fits no image of {size} rows along dim {dim}")
        tensor = block_of(tensor, (dim,), (RowRange(*rows),))
    return tensor


def as_slabs(func: Func, result: Any, cut: ImageCut, leaves: Iterable[Any] = ()) -> Any:
    """A function's result with its tensors as slabs: one tensor, or a tuple or list of them."""
    if isinstance(result, (tuple, list)):
        return type(result)(as_slabs(func, member, cut, leaves) for member in result)
    if not isinstance(result, Tensor) or isinstance(result, Slab):
        return result
    if any(result is leaf for leaf in leaves):
        raise refusal(func, "it would write an image into a tensor that every process has")
    return slab(result, cut)


def shape_preserving(func: Func, x: Slab, *args: Any, **kwargs: Any) -> Any:
    """A function from one slab to a tensor of the same shape, or to several."""
    return as_slabs(func, func(x, *args, **kwargs), x.cut)


def on_local_tensor(func: Func, *args: Any, **kwargs: Any) -> Any:
    """A function that needs no more than the local tensor: a query, or a setting of autograd."""
    return func(*args, **kwargs)


def along_dim(func: Func, x: Slab, *args: Any, **kwargs: Any) -> Any:
    """Functions along a dim that is not cut, such as softmax; `dim` is the first argument or a keyword."""
    dim = kwargs.get("dim", args[0] if args else -1)
    if not isinstance(dim, int):
        raise refusal(func, "its dim has to be given, as an int")
    refuse_cut_dims(func, x, dim)
    return shape_preserving(func, x, *args, **kwargs)


def normalize(func: Func, x: Slab, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Any:
    """torch.nn.functional.normalize, whose dim is its third argument."""
    refuse_cut_dims(func, x, dim)
    return shape_preserving(func, x, p, dim, eps)


def along_channels(func: Func, x: Slab, axis: Any, dim: int, sizes: tuple[int, ...]) -> Any:
    """Channels gathered from, or dealt out to, the processes of a tensor axis, which hold the same rows."""
    refuse_cut_dims(func, x, dim)
    return as_slabs(func, func(x, axis, dim, sizes), x.cut)


def refuse_cut_dims(func: Func, x: Slab, *dims: int) -> None:
    for dim in dims:
        if (dim if dim < 0 else dim - x.ndim) in x.cut.dims:
            raise refusal(func, f"dim {dim} is cut: no process has all of it")


def per_channel(func: Func, x: Slab, *args: Any, **kwargs: Any) -> Any:
    """Functions of each pixel with weights, or with the other channels of the pixel."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for at, tensor in zip(tensors, with_summed_gradients(x.cut.grid, *(leaves[at] for at in tensors)), strict=True):
        leaves[at] = tensor
    args, kwargs = tree_unflatten(leaves, form)
    return as_slabs(func, func(x, *args, **kwargs), x.cut)


def linear(func: Func, x: Slab, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear layer over channels in the last dim."""
    refuse_cut_dims(func, x, -1)
    return per_channel(func, x, weight, bias)


def layer_norm(func: Func, x: Slab, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Layer normalization over dims that are not cut, such as channels in the last dim."""
    refuse_cut_dims(func, x, *range(-len(normalized_shape), 0))
    return per_channel(func, x, normalized_shape, *args, **kwargs)


def dropout(func: Func, x: Slab, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout with the mask of the whole image; each process uses its rows of the mask.

    So generators that are in the same state on all processes draw what one device would draw, and are in the same state
    afterwards: dropout behind a global pool has to be the same on every process.
    """
    if not training or p == 0:
        return x
    mask = F.dropout(torch.ones(x.cut.whole(x.shape), dtype=x.dtype, device=x.device), p)
    slab_mask = block_of(mask, x.cut.dims, x.cut.spans)
    return slab(x * slab_mask, x.cut) if not inplace else x.mul_(slab_mask)
