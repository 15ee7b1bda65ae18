"""The public functions: prepare a module for slabs, cut an image into slabs, and gather it again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from stretto.errors import UsageError
from stretto.options.checks import of_kind, refuse
from stretto.parallel.space import table  # noqa: F401 - it gives slabs their handlers
from stretto.parallel.space.exchange import Collect, Scatter
from stretto.parallel.space.geometry import cuts
from stretto.parallel.space.slab import Grid, ImageCut, PlainTensors, Slab, cut_dims, slab

MAX_DIMS = 8  # of a tensor whose shape processes exchange

REFUSED: dict[type[nn.Module], str] = {
    nn.SyncBatchNorm: "use BatchNorm: on slabs it has the statistics of the whole image anyway",
    nn.MaxUnpool1d: "indices of single elements have no meaning in a part of the image; use Upsample or ConvTranspose",
    nn.MaxUnpool2d: "indices of single elements have no meaning in a part of the image; use Upsample or ConvTranspose",
    nn.MaxUnpool3d: "indices of single elements have no meaning in a part of the image; use Upsample or ConvTranspose",
}


def spatial(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Prepare `module`, in place, to work on slabs of images, and return it; its parameters keep their names.

    `mesh` has an axis "height" or "width" or both, perhaps beside others. Inputs are plain tensors: those with at least
    three dims are this process's slabs, cut as `scatter` cuts them; all others are the same on every process. Outputs
    are slabs; behind a global pool or a flatten they are whole and the same on every process. Every process has to run
    the same forwards and backwards in the same order.

    The module may be one that `tensor` has cut over the same mesh, with parameters="local": processes with the same
    rows exchange channels, and gradients are those of each process's own part of the weights.

    After a backward every process holds the gradients that one device would have. The loss is the sum of all slabs'
    losses or, if the output is whole, the one loss of it. Dropout has the masks of one device if the generators of all
    processes were in the same state. Raises UsageError for a layer or function that cannot work on slabs: here, or
    when it runs.
    """
    grid = Grid.of(mesh)
    of_kind("stretto.parallel.spatial: module", module, nn.Module, "an nn.Module")
    for name, layer in module.named_modules():
        if type(layer) in REFUSED:
            where = f"{type(layer).__name__}{f' ({name})' if name else ''}"
            raise UsageError(f"stretto.parallel.spatial: {where} does not work on slabs: {REFUSED[type(layer)]}")
        if any(isinstance(hook, ToSlabs) for hook in layer._forward_pre_hooks.values()):
            raise UsageError(
                f"stretto.parallel.spatial: {name or 'this module'} has been prepared already: prepare a module once, "
                "and either the whole or its parts"
            )
    module.register_forward_pre_hook(ToSlabs(grid), with_kwargs=True)
    module.register_forward_hook(to_plain)
    return module


def scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's slab of an image [N, C, ..., H, W] that every process has, cut as torch.tensor_split cuts.

    Its backward gathers the image's whole gradient on every process. Raises UsageError if a process would have no rows.
    """
    grid = Grid.of(mesh)
    check_image("scatter: x", x)
    dims = cut_dims(grid, x.ndim, "scatter")
    cut = ImageCut(grid, dims, ()).resized(tuple(x.size(dim) for dim in dims), "scatter")
    slab: Tensor = Scatter.apply(x, cut)  # type: ignore[no-untyped-call]
    return slab


def collect(slab: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole image on every process, gathered from the slabs of all.

    Its backward takes this process's slice of the gradient, so that a loss which every process computes of the whole
    image counts once. Raises UsageError if the slabs are not those of one image.
    """
    check_image("collect: slab", slab)
    image: Tensor = Collect.apply(slab, agreed_cut(slab, Grid.of(mesh), "collect"))  # type: ignore[no-untyped-call]
    return image


def check_image(name: str, x: Tensor) -> None:
    """Refuse anything but a dense tensor with data."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
        refuse(f"stretto.parallel.{name}", x, "a dense tensor, [N, C, ..., H, W]")


class ToSlabs:
    """Turns a module's input tensors into slabs; a forward pre-hook."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        where = f"stretto.parallel.spatial: the input of {type(module).__name__}"
        enter = lambda value: self.entered(value, where)  # noqa: E731
        return tree_map(enter, args), tree_map(enter, kwargs)

    def entered(self, value: Any, where: str) -> Any:
        """A tensor with at least three dims as a slab; any other value unchanged."""
        if not isinstance(value, Tensor) or value.ndim < 3:
            return value
        return slab(value.view_as(value), agreed_cut(value, self.grid, where))


def whole(module: nn.Module, args: Any, output: Any) -> Any:
    """Gather slabs in a module's output into images; a forward hook, registered before `spatial` is called."""

    def collected(value: Any) -> Any:
        if not isinstance(value, Slab):
            return value
        return Collect.apply(value.as_subclass(Tensor), value.cut)  # type: ignore[no-untyped-call]

    with PlainTensors():
        return tree_map(collected, output)


def refuse_whole(module: nn.Module, args: Any, output: Any) -> None:
    """Refuse a whole image in the output, which the next stage would take for a slab; a forward hook, as `whole`."""
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and not isinstance(value, Slab) and value.ndim > 2:
            raise UsageError(
                f"stretto.parallel.spatial: {type(module).__name__} ends behind a global pool or the like, where every "
                f"process has the whole {list(value.shape)}, but the next stage takes tensors of three dims and more "
                "for slabs: cut the model elsewhere, for example behind the flatten"
            )


def to_plain(module: nn.Module, args: Any, output: Any) -> Any:
    """Turn slabs in a module's output into plain tensors; a forward hook."""
    with PlainTensors():
        return tree_map(lambda value: value.as_subclass(Tensor) if isinstance(value, Slab) else value, output)


def agreed_cut(x: Tensor, grid: Grid, what: str) -> ImageCut:
    """The cut of the image that the slabs of all processes form; the processes exchange their slabs' shapes.

    That is one message of 72 bytes a forward. A cache by shape would not do: 2 rows may be the second half of 4 or of
    5, so that one process would find its shape in the cache while another waits for its message. Raises UsageError if
    the slabs are not those of one image.
    """
    dims = cut_dims(grid, x.ndim, what)
    message = torch.zeros(1 + MAX_DIMS, dtype=torch.int64)
    message[: 1 + x.ndim] = torch.tensor([x.ndim, *x.shape])
    shapes = [tuple(numbers[1 : 1 + numbers[0]]) for numbers in grid.gather(message.to(x.device)).tolist()]
    sizes = tuple(
        sum(shapes[rank][dim] for rank in ranks_along(grid.parts, axis) if len(shapes[rank]) == x.ndim)
        for axis, dim in enumerate(dims)
    )
    expected = [tuple(cut_shape(x, dims, sizes, grid.parts, place)) for place in places(grid.parts)]
    if shapes != expected or min(sizes) == 0:
        raise UsageError(
            f"{what}: the processes hold slabs of shapes {', '.join(map(str, shapes))}; these are not slabs of one "
            f"image cut by {' and '.join(grid.axes)} into {' x '.join(map(str, grid.parts))} parts as "
            "torch.tensor_split cuts: make them with stretto.parallel.scatter"
        )
    return ImageCut(grid, dims, ()).resized(sizes, what)


def ranks_along(parts: Sequence[int], axis: int) -> list[int]:
    """The ranks along one axis, at coordinate 0 of all other axes."""
    return [rank for rank, place in enumerate(places(parts)) if not any(place[:axis] + place[axis + 1 :])]


def places(parts: Sequence[int]) -> list[tuple[int, ...]]:
    """The coordinates of each rank in the grid."""
    coordinates: list[tuple[int, ...]] = [()]
    for count in parts:
        coordinates = [(*place, at) for place in coordinates for at in range(count)]
    return coordinates


def cut_shape(
    x: Tensor, dims: tuple[int, ...], sizes: tuple[int, ...], parts: Sequence[int], place: tuple[int, ...]
) -> list[int]:
    """The shape of the slab at a place, for an image of these sizes along the cut dims."""
    shape = list(x.shape)
    for dim, size, count, at in zip(dims, sizes, parts, place, strict=True):
        shape[dim] = cuts(size, count)[at].size
    return shape
