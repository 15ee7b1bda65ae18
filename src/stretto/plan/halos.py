"""What processes with slabs of images send each other, in pixels: the very boxes that `parallel.space` sends."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from stretto.cost.layer_table import ImageWindow, LayerCost
from stretto.parallel.space.geometry import RowRange, SlidingWindow, Window, cuts, want
from stretto.parallel.space.halo import AxisRows, axis_rows, route


class Exchanged(NamedTuple):
    """Pixels of each message of one exchange: those that each process sends, and those that it receives."""

    sends: tuple[tuple[int, ...], ...]
    receives: tuple[tuple[int, ...], ...]


NOTHING = Exchanged((), ())


class CutImage(NamedTuple):
    """The cut axes of an image window: its input's rows, what slides along them, and the parts."""

    sizes: tuple[int, ...]
    windows: tuple[Window, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, window: ImageWindow, space: tuple[int, int]) -> "CutImage":
        """The axes of a window that `space` cuts."""
        axes = [axis for axis in (0, 1) if space[axis] > 1]
        return cls(
            tuple(window.sizes[axis] for axis in axes),
            tuple(window.windows[axis] for axis in axes),
            tuple(space[axis] for axis in axes),
        )

    @property
    def whole(self) -> bool:
        """Whether every process has the whole image by now: a single row is never cut, it comes from a global pool."""
        return 1 in self.sizes

    @property
    def outputs(self) -> tuple[int, ...]:
        """The rows of the output along each cut axis."""
        return tuple(window.outputs(size) for window, size in zip(self.windows, self.sizes, strict=True))


def too_few_rows(window: ImageWindow, space: tuple[int, int]) -> bool:
    """Whether some process would have no row of the input or the output, which training refuses."""
    cut = CutImage.of(window, space)
    if cut.whole:
        return False
    outputs = () if window.at_one_row != "refused" and set(cut.outputs) == {1} else cut.outputs
    return any(rows < count for sizes in (cut.sizes, outputs) for rows, count in zip(sizes, cut.parts, strict=False))


def exchanged(window: ImageWindow, space: tuple[int, int]) -> Exchanged:
    """The pixels that a window's forward sends, process by process; its backward sends as many the other way."""
    cut = CutImage.of(window, space)
    summed = window.at_one_row == "summed" and set(cut.outputs) == {1}
    if cut.whole or summed or not cut.parts:
        return NOTHING
    axes = zip(window.sizes, window.windows, space, strict=True)
    uncut = prod(uncut_rows(size, slid) for size, slid, count in axes if count == 1)
    return boxes_of(cut, uncut, gathers=gathers(window, space))


def uncut_rows(size: int, window: Window) -> int:
    """The rows that are sent of an axis that is not cut: a convolution with unequal padding pads it beforehand."""
    if isinstance(window, SlidingWindow) and window.before != window.after:
        return size + window.before + window.after
    return size


@lru_cache(maxsize=4096)
def boxes_of(cut: CutImage, uncut: int, *, gathers: bool) -> Exchanged:
    """The messages of an exchange; `uncut` is the number of pixels for each row of the cut axes."""
    rows = gathered_rows(cut) if gathers else axis_rows(cut.windows, cut.sizes, cut.parts)
    routes = [route(rows, place) for place in product(*map(range, cut.parts))]
    return Exchanged(
        tuple(tuple(uncut * pixels(box.source) for box in each.sends) for each in routes),
        tuple(tuple(uncut * pixels(box.target) for box in each.receives) for each in routes),
    )


def gathered_rows(cut: CutImage) -> tuple[AxisRows, ...]:
    """Along each cut axis, what processes have where all of them want the whole image."""
    return tuple(
        AxisRows(cuts(size, count), (want(RowRange(0, size), size),) * count)
        for size, count in zip(cut.sizes, cut.parts, strict=True)
    )


def pixels(block: Sequence[RowRange]) -> int:
    """The number of pixels in a block of the cut axes."""
    return prod(rows.size for rows in block)


class HaloBytes(NamedTuple):
    """Bytes of each message that each process sends in a layer's forward and in its backward."""

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]


NO_BYTES = HaloBytes((), ())


def halo_bytes(layer: LayerCost, space: tuple[int, int], examples: float) -> HaloBytes:
    """The messages of a layer's convolutions and pools, on the whole images of a micro-batch cut by `space`.

    Backward sends the gradients of received rows back; not of gathered images, of which each process has its slice.
    """
    processes = space[0] * space[1]
    forward: list[list[float]] = [[] for _ in range(processes)]
    backward: list[list[float]] = [[] for _ in range(processes)]
    for window in layer.image_windows:
        pixel, found = window.pixel.at(examples), exchanged(window, space)
        for place, (sends, receives) in enumerate(zip(*found, strict=True)):
            forward[place] += [pixel * number for number in sends]
            if window.differentiated and not gathers(window, space):
                backward[place] += [pixel * number for number in receives]
    return HaloBytes(*(tuple(map(tuple, sides)) for sides in (forward, backward)))


def gathers(window: ImageWindow, space: tuple[int, int]) -> bool:
    """Whether a pool gathers whole images, as its output has one row along each cut axis."""
    return window.at_one_row == "gathered" and set(CutImage.of(window, space).outputs) == {1}
