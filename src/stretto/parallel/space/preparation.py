"""What a script uses: prepare a module for slabs, cut an image, put it together again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from stretto.errors import UsageError
from stretto.options.checks import of_kind, refuse
from stretto.parallel.space.exchange import Collect, Scatter
from stretto.parallel.space.geometry import cuts
from stretto.parallel.space.grid import Grid
from stretto.parallel.space.slab import ImageCut, Plainly, Slab, positions, slab

LONGEST = 8  # dims of a tensor that processes tell each other

REFUSED: dict[type[nn.Module], str] = {
    nn.SyncBatchNorm: "use BatchNorm: here it has the statistics of the whole image anyway",
    nn.MaxUnpool1d: "indices of single elements have no meaning in a part of the image; use Upsample or ConvTranspose",
    nn.MaxUnpool2d: "indices of single elements have no meaning in a part of the image; use Upsample or ConvTranspose",
    nn.MaxUnpool3d: "indices of single elements have no meaning in a part of the image; use Upsample or ConvTranspose",
}


def spatial(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Prepare `module`, in place, for slabs; its parameters keep their names, and it is returned.

    `mesh` has an axis "height" or "width" or both, perhaps beside others. What goes in are plain tensors: those with
    at least three dims are this process's slabs, cut as `scatter` cuts them, all others are the same on every process.
    What comes out are slabs of the output, or, behind a global pool or a flatten, what every process has alike. Every
    process has to run the same forwards and backwards in the same order.

    After a backward every process holds the gradients of one device, where each began at the loss of its own slab (the
    losses count as summed), or at the same loss of a replicated output (it counts once). Dropout's masks are those of
    one device, if the generators stood alike. Raises UsageError where a layer or function is not known, here or when it
    runs.
    """
    grid = Grid.of(mesh)
    of_kind("stretto.parallel.spatial: module", module, nn.Module, "an nn.Module")
    for name, part in module.named_modules():
        if type(part) in REFUSED:
            where = f"{type(part).__name__}{f' ({name})' if name else ''}"
            raise UsageError(f"stretto.parallel.spatial: {where} does not work on slabs: {REFUSED[type(part)]}")
        if any(isinstance(hook, Entry) for hook in part._forward_pre_hooks.values()):
            raise UsageError(
                f"stretto.parallel.spatial: {name or 'this module'} has been prepared already: prepare a module once, "
                "and either the whole or its parts"
            )
    module.register_forward_pre_hook(Entry(grid), with_kwargs=True)
    module.register_forward_hook(leave)
    return module


def scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's slab of an image that every process has, cut as torch.tensor_split cuts.

    Of an image that needs a gradient, every process gets all of it.
    """
    grid = Grid.of(mesh)
    check_image("scatter: x", x)
    dims = positions(grid, x.ndim, "scatter")
    cut = ImageCut(grid, dims, ()).resized(tuple(x.size(dim) for dim in dims), "scatter")
    own: Tensor = Scatter.apply(x, cut)  # type: ignore[no-untyped-call]
    return own


def collect(slab: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole image, on every process. Its backward is the local slice: a loss of the image counts once."""
    check_image("collect: slab", slab)
    image: Tensor = Collect.apply(slab, learned(slab, Grid.of(mesh), "collect"))  # type: ignore[no-untyped-call]
    return image


def check_image(name: str, x: Tensor) -> None:
    """Refuse what is no dense tensor with numbers in it."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
        refuse(f"stretto.parallel.{name}", x, "a dense tensor, [N, C, ..., H, W]")


class Entry:
    """Turns a module's tensors into slabs; a forward hook, called before it runs."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with slabs."""
        where = f"stretto.parallel.spatial: the input of {type(module).__name__}"
        enter = lambda value: self.entered(value, where)  # noqa: E731
        return tree_map(enter, args), tree_map(enter, kwargs)

    def entered(self, value: Any, where: str) -> Any:
        """A slab of what has rows to cut, anything else as it is."""
        if not isinstance(value, Tensor) or value.ndim < 3:
            return value
        return slab(value.view_as(value), learned(value, self.grid, where))


def whole(module: nn.Module, args: Any, output: Any) -> Any:
    """Put slabs together; a forward hook, to be registered before `spatial` prepares the module."""

    def collected(value: Any) -> Any:
        if not isinstance(value, Slab):
            return value
        return Collect.apply(value.as_subclass(Tensor), value.cut)  # type: ignore[no-untyped-call]

    with Plainly():
        return tree_map(collected, output)


def refuse_whole(module: nn.Module, args: Any, output: Any) -> None:
    """Refuse a whole image, which another module would take for a slab; a forward hook, registered as `whole` is."""
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and not isinstance(value, Slab) and value.ndim > 2:
            raise UsageError(
                f"stretto.parallel.spatial: {type(module).__name__} ends behind a global pool or the like, where every "
                f"process has the whole {list(value.shape)}, but the next stage takes tensors of three dims and more "
                "for slabs: cut the model elsewhere, for example behind the flatten"
            )


def leave(module: nn.Module, args: Any, output: Any) -> Any:
    """Turn slabs into plain tensors; a forward hook, called after a module has run."""
    with Plainly():
        return tree_map(lambda value: value.as_subclass(Tensor) if isinstance(value, Slab) else value, output)


def learned(x: Tensor, grid: Grid, what: str) -> ImageCut:
    """The image that slabs make together: processes tell each other their shapes.

    That is one message of 72 bytes a forward. It cannot be remembered by shape: 2 rows may be the second half of 4 or
    of 5, and while one process remembered, another would ask.
    """
    dims = positions(grid, x.ndim, what)
    mine = torch.zeros(1 + LONGEST, dtype=torch.int64)
    mine[: 1 + x.ndim] = torch.tensor([x.ndim, *x.shape])
    shapes = [tuple(told[1 : 1 + told[0]]) for told in grid.gather(mine.to(x.device)).tolist()]
    sizes = tuple(
        sum(shapes[rank][dim] for rank in along(grid.parts, axis) if len(shapes[rank]) == x.ndim)
        for axis, dim in enumerate(dims)
    )
    expected = [tuple(cut_shape(x, dims, sizes, grid.parts, place)) for place in places(grid.parts)]
    wrong = next((rank for rank, pair in enumerate(zip(shapes, expected, strict=True)) if pair[0] != pair[1]), None)
    if wrong is not None or min(sizes) == 0:
        raise UsageError(
            f"{what}: the processes hold slabs of shapes {', '.join(map(str, shapes))}, which are no image cut by "
            f"{' and '.join(grid.axes)} in {' x '.join(map(str, grid.parts))} parts as torch.tensor_split cuts: "
            "make them with stretto.parallel.scatter"
        )
    return ImageCut(grid, dims, ()).resized(sizes, what)


def along(parts: Sequence[int], axis: int) -> list[int]:
    """The ranks along one axis, at the beginning of the others."""
    return [rank for rank, place in enumerate(places(parts)) if not any(place[:axis] + place[axis + 1 :])]


def places(parts: Sequence[int]) -> list[tuple[int, ...]]:
    """Where each rank stands in the grid."""
    every: list[tuple[int, ...]] = [()]
    for count in parts:
        every = [(*place, at) for place in every for at in range(count)]
    return every


def cut_shape(
    x: Tensor, dims: tuple[int, ...], sizes: tuple[int, ...], parts: Sequence[int], place: tuple[int, ...]
) -> list[int]:
    """The shape that the slab at a place should have."""
    shape = list(x.shape)
    for dim, size, count, at in zip(dims, sizes, parts, place, strict=True):
        shape[dim] = cuts(size, count)[at].size
    return shape
