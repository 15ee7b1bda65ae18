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
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors  # a context in which slabs are plain tensors

from stretto.errors import UsageError
from stretto.parallel.space.geometry import RowRange, cuts
from stretto.parallel.space.grid import Grid


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
        """The image's shape for a slab's."""
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
