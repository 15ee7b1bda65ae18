"""Slab: one process's part of an image, as a tensor with the image's shape.

The arithmetic of layers needs the image's size, which a slab's own rows do not tell: 2 rows may be the second half of
4 or of 5. So, inside a module that `spatial` prepared, a slab is a subclass of Tensor that carries the image's sizes.
torch calls its `__torch_function__` for every function, in nn modules and in a user's forward alike. It shows the shape
of the whole image, so that arithmetic on shapes gives the same as on one device. Outside the module slabs are plain
tensors.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors  # a context in which slabs are plain tensors
from torch.distributed.device_mesh import DeviceMesh

from stretto.errors import UsageError
from stretto.nn.buckets import joined, split_like
from stretto.options.checks import of_kind
from stretto.parallel.space.geometry import RowRange, cuts
from stretto.parallel.space.halo import Place

AXES = ("height", "width")
TAG = 0x5AB  # of messages in the default group, between processes that share no axis


@dataclass(frozen=True, eq=False)
class Grid:
    """The number of parts along each cut axis, this process's coordinates, and the ranks of all its processes.

    It uses the mesh's groups and makes none: all processes of a job would have to take part, also those that share no
    image.
    """

    axes: tuple[str, ...]
    parts: tuple[int, ...]
    place: Place
    ranks: tuple[int, ...]  # in the default group, row by row
    groups: tuple[dist.ProcessGroup, ...]  # along each axis

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Grid":
        """The spatial part of a mesh, which may have other axes beside it."""
        of_kind(
            "mesh", mesh, DeviceMesh, 'a torch DeviceMesh: init_device_mesh("cpu", (2,), mesh_dim_names=("height",))'
        )
        names = mesh.mesh_dim_names or ()
        axes = tuple(axis for axis in AXES if axis in names)
        if not axes:
            raise UsageError(
                f'spatial parallelism: the mesh has the axes {names or "(no names)"}, none of them "height" or '
                '"width". For example: init_device_mesh("cpu", (2,), mesh_dim_names=("height",))'
            )
        order = sorted(axes, key=names.index)  # a mesh is sliced in its own order
        space = mesh[tuple(order)]
        ranks = space.mesh.permute([order.index(axis) for axis in axes]).flatten().tolist()
        parts = tuple(space[axis].size() for axis in axes)
        place = tuple(space.get_local_rank(axis) for axis in axes)
        return cls(axes, parts, place, tuple(ranks), tuple(space.get_group(axis) for axis in axes))

    @property
    def size(self) -> int:
        """The number of processes that share an image."""
        return len(self.ranks)

    def p2p_operation(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        """A send to or receive from the process of rank `peer` in the grid; `operation`: dist.isend or dist.irecv."""
        one_axis = len(self.axes) == 1
        group, tag = (self.groups[0], 0) if one_axis else (None, TAG)
        return dist.P2POp(operation, tensor, self.ranks[peer], group, tag)

    def __deepcopy__(self, memo: object) -> "Grid":
        return self  # a copy of a module talks to the same processes

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The sums over all processes, in one all-reduce an axis; bit for bit the same on every process."""
        if self.size == 1 or not tensors:
            return tensors
        flat = joined(tensors)
        for group in self.groups:
            dist.all_reduce(flat, group=group)
        return tuple(total.to(tensor.dtype) for total, tensor in zip(split_like(flat, tensors), tensors, strict=True))

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, which have one shape, stacked by rank: [processes, *shape]."""
        gathered = tensor[None]
        for group, parts in zip(reversed(self.groups), reversed(self.parts), strict=True):
            received = [torch.empty_like(gathered) for _ in range(parts)]
            dist.all_gather(received, gathered, group=group)
            gathered = torch.cat(received)
        return gathered


@dataclass(frozen=True)
class ImageCut:
    """How an image is cut: for each axis of the grid the dim, counted from the end, and its size in the whole image."""

    grid: Grid
    dims: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def spans(self) -> tuple[RowRange, ...]:
        """This process's rows along each axis."""
        axes = zip(self.sizes, self.grid.parts, self.grid.place, strict=True)
        return tuple(cuts(size, parts)[part] for size, parts, part in axes)

    def resized(self, sizes: tuple[int, ...], what: str) -> "ImageCut":
        """The cut of an image of other sizes. Raises UsageError if a process would have no rows."""
        for axis, size, parts in zip(self.grid.axes, sizes, self.grid.parts, strict=True):
            if size < parts:
                raise UsageError(
                    f"{what}: {size} rows along {axis} for {parts} processes, so {parts - max(size, 0)} would have "
                    f"none: use at most {max(size, 1)} processes along {axis}, or larger images"
                )
        return ImageCut(self.grid, self.dims, tuple(sizes))

    def whole(self, shape: torch.Size) -> torch.Size:
        sizes = list(shape)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            sizes[dim] = size
        return torch.Size(sizes)


def cut_dims(grid: Grid, ndim: int, what: str) -> tuple[int, ...]:
    """The dims that the grid's axes cut: -2 by height and -1 by width; of a signal [N, C, L] the last by either."""
    if ndim >= 4:
        return tuple({"height": -2, "width": -1}[axis] for axis in grid.axes)
    if ndim == 3 and len(grid.axes) == 1:
        return (-1,)
    raise UsageError(
        f"{what}: a tensor of {ndim} dims cannot be cut by {' and '.join(grid.axes)}: images are [N, C, ..., H, W]; "
        "signals [N, C, L] are cut along one axis only"
    )


class Slab(Tensor):
    """One process's part of an image; `cut` describes the image.

    `handler_of` gives what is called instead of a function of torch: `table` sets it.
    """

    cut: ImageCut
    handler_of: ClassVar[Callable[[Callable[..., Any]], Callable[..., Any]]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with PlainTensors():
            return cls.handler_of(func)(func, *args, **(kwargs or {}))


def slab(tensor: Tensor, cut: ImageCut) -> Tensor:
    """Make a new tensor a slab: the same object, so that autograd need not keep a view and its base consistent."""
    tensor.__class__ = Slab
    assert isinstance(tensor, Slab)
    tensor.cut = cut
    return tensor


def refusal(func: Callable[..., Any], why: str) -> UsageError:
    """The error for a function that cannot work on a slab, with the module that calls it."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    name = getattr(owner, "__name__", name) if name in ("__get__", "__set__") else name
    return UsageError(
        f"stretto.parallel.spatial: {name} {place_of_call()}on a slab: {why}. Use functions that "
        "stretto/parallel/space/table.py lists, or end the spatial part before it: prepare only the layers before it, "
        "then call image = stretto.parallel.collect(slab, mesh) and give the image to the other layers"
    )


def place_of_call() -> str:
    """The innermost module whose forward is running, with its path in the outermost one: "in Conv2d (0.conv) "."""
    modules = list(calling_modules(sys._getframe()))
    if not modules:
        return ""
    path = next((path for path, module in modules[-1].named_modules() if module is modules[0]), "")
    return f"in {type(modules[0]).__name__}{f' ({path})' if path else ''} "


def calling_modules(frame: Any) -> Iterator[nn.Module]:
    """The modules whose methods are running, from the innermost to the outermost."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back


__all__ = ["ImageCut", "PlainTensors", "Slab", "cut_dims", "place_of_call", "refusal", "slab"]
