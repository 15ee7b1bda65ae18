"""A process's part of an image, as a tensor that knows the whole: what a module's own code works with.

The arithmetic of layers needs the image's size, and a slab's own rows do not tell it: 2 rows may be the second half of
4 or of 5. So, inside a module that `spatial` prepared, slabs are a subclass of Tensor that carries the sizes along.
Torch asks it before each function (`__torch_function__`), which serves nn modules and functions in a user's forward
alike; its shape is the whole image's, so that arithmetic on shapes comes out as on one device. Outside a module there
are plain tensors.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as Plainly  # slabs are plain tensors while it lasts

from stretto.errors import UsageError
from stretto.parallel.space.geometry import RowRange, cuts
from stretto.parallel.space.grid import Grid


@dataclass(frozen=True)
class ImageCut:
    """Where a tensor is cut: for each axis of the grid which dim, counted from the end, and its size in the image."""

    grid: Grid
    dims: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def spans(self) -> tuple[RowRange, ...]:
        """This process's rows along each axis."""
        mine = zip(self.sizes, self.grid.parts, self.grid.place, strict=True)
        return tuple(cuts(size, parts)[part] for size, parts, part in mine)

    def resized(self, sizes: tuple[int, ...], what: str) -> "ImageCut":
        """The cut of an image of another size, of which every process must have a part."""
        for axis, size, parts in zip(self.grid.axes, sizes, self.grid.parts, strict=True):
            if size < parts:
                raise UsageError(
                    f"{what}: {size} rows along {axis} for {parts} processes, so {parts - max(size, 0)} would have "
                    f"none: use at most {max(size, 1)} processes along {axis}, or larger images"
                )
        return ImageCut(self.grid, self.dims, tuple(sizes))

    def whole(self, shape: torch.Size) -> torch.Size:
        """The image's shape for a slab's."""
        sizes = list(shape)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            sizes[dim] = size
        return torch.Size(sizes)


def positions(grid: Grid, ndim: int, what: str) -> tuple[int, ...]:
    """Which dims an image is cut along: the last two by height and width; a signal [N, C, L] along its only one."""
    if ndim >= 4:
        return tuple({"height": -2, "width": -1}[axis] for axis in grid.axes)
    if ndim == 3 and len(grid.axes) == 1:
        return (-1,)
    raise UsageError(
        f"{what}: a tensor of {ndim} dims cannot be cut by {' and '.join(grid.axes)}: images are [N, C, ..., H, W]; "
        "signals [N, C, L] are cut along one axis only"
    )


class Slab(Tensor):
    """This process's part of an image; `cut` says of which."""

    cut: ImageCut

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from stretto.parallel.space.table import meaning

        with Plainly():
            return meaning(func)(func, *args, **(kwargs or {}))


def slab(tensor: Tensor, cut: ImageCut) -> Tensor:
    """Make a fresh tensor a slab: the same object, so that autograd has no view of it to keep in step."""
    tensor.__class__ = Slab
    assert isinstance(tensor, Slab)
    tensor.cut = cut
    return tensor


def refuse(func: Callable[..., Any], why: str) -> UsageError:
    """What a function cannot do with a slab, and where it stands."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    name = getattr(owner, "__name__", name) if name in ("__get__", "__set__") else name
    return UsageError(
        f"stretto.parallel.spatial: {name} {place_of_call()}on a slab: {why}. Say it with functions that "
        "stretto/parallel/space/table.py lists, or end the spatial part before it: prepare the layers up to there, "
        "then image = stretto.parallel.collect(slab, mesh), then the rest as it is"
    )


def place_of_call() -> str:
    """Which module is calling; the innermost one, by its path in the outermost."""
    modules = list(calling(sys._getframe()))
    if not modules:
        return ""
    path = next((name for name, part in modules[-1].named_modules() if part is modules[0]), "")
    return f"in {type(modules[0]).__name__}{f' ({path})' if path else ''} "


def calling(frame: Any) -> Iterator[nn.Module]:
    """The modules whose methods are running, from the inside out."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back


__all__ = ["ImageCut", "Plainly", "Slab", "place_of_call", "positions", "refuse", "slab"]
