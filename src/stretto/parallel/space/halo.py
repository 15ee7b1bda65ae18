"""A convolution's slab and its halos, told apart so that neither waits: whole numbers only, no torch in here.

A convolution is linear in its input. So a process convolves its own rows as they lie, the rest taken as zero, and what
the halos add to the outputs near a border is added when they have come. No copy of the slab is made, and in backward
the halos' gradients leave first.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from stretto.parallel.space.geometry import RowRange, SlidingWindow, cuts, want
from stretto.parallel.space.route import AxisRows, Block, Place, RowExchange, route


@dataclass(frozen=True)
class Strip:
    """One side's halo: the outputs that it touches, and the buffer, zero but for the halo, that they are made from."""

    outs: Block  # in this process's output
    shape: tuple[int, ...]  # of the buffer, along the cut axes
    boxes: tuple[int, ...]  # which of the route's receives belong here
    at: tuple[Block, ...]  # where each goes in the buffer


@dataclass(frozen=True)
class Halo:
    """One process's plan for a convolution whose halos are added."""

    padding: tuple[int, ...]  # along the cut axes, for its own rows
    strips: tuple[Strip, ...]
    way: RowExchange


@dataclass(frozen=True)
class Side:
    """One axis for one process."""

    window: SlidingWindow
    size: int
    own: RowRange
    out: RowRange

    @property
    def hull(self) -> RowRange:
        """All rows that it needs, those beyond the border included."""
        return self.window.hull(self.out)

    @property
    def lead(self) -> int:
        """Rows before its own that its first output sees."""
        return self.own.start - self.hull.start

    @property
    def alone(self) -> bool:
        """Whether its own rows, padded alike on both sides, make outputs that stand where they have to."""
        if self.lead < 0:
            return False
        alike = replace(self.window, before=self.lead, after=self.lead, ceil=False)
        return alike.outputs(self.own.size) == self.out.size

    @property
    def halos(self) -> tuple[RowRange, RowRange]:
        """The rows of others that it needs, before and after its own."""
        inside = self.hull.both(RowRange(0, self.size))
        return RowRange(inside.start, self.own.start), RowRange(self.own.stop, inside.stop)

    @property
    def touched(self) -> int:
        """How many outputs see halos."""
        return sum(self.window.seen(rows, self.out).size for rows in self.halos if rows.size)


def lines(windows: tuple[SlidingWindow, ...], sizes: tuple[int, ...], parts: tuple[int, ...]) -> tuple[AxisRows, ...]:
    """What everybody has of the input, and wants of it, along each axis."""
    return tuple(
        AxisRows(cuts(size, p), tuple(want(window.hull(out), size) for out in cuts(window.outputs(size), p)))
        for window, size, p in zip(windows, sizes, parts, strict=True)
    )


@lru_cache(maxsize=1024)
def halo(
    windows: tuple[SlidingWindow, ...], sizes: tuple[int, ...], parts: tuple[int, ...], place: Place, thin: float
) -> Halo | None:
    """The plan of the process at `place`; None, on all processes, where it does not suit one of them.

    It does not suit where a slab's own rows make no outputs in the right places, as with most strides that meet uneven
    cuts, and where halos touch more than a share `thin` of the outputs.
    """
    axes = [
        [Side(window, size, *pair) for pair in zip(cuts(size, p), cuts(window.outputs(size), p), strict=True)]
        for window, size, p in zip(windows, sizes, parts, strict=True)
    ]
    if not all(side.alone and side.touched <= thin * side.out.size for axis in axes for side in axis):
        return None
    mine = tuple(axis[at] for axis, at in zip(axes, place, strict=True))
    way = route(lines(windows, sizes, parts), place)
    strips = tuple(strip(mine, way, axis, rows) for axis, side in enumerate(mine) for rows in side.halos if rows.size)
    assert sum(len(each.boxes) for each in strips) == len(way.receives), "a box belongs to one strip"
    return Halo(tuple(side.lead for side in mine), strips, way)


def strip(sides: tuple[Side, ...], way: RowExchange, axis: int, rows: RowRange) -> Strip:
    """The halo on one side of one axis: own rows only along the axes before it, corners included along those after."""
    inside = tuple(
        rows if at == axis else side.hull.both(side.own if at < axis else RowRange(0, side.size))
        for at, side in enumerate(sides)
    )
    outs = tuple(side.window.seen(each, side.out) for side, each in zip(sides, inside, strict=True))
    hulls = tuple(side.window.hull(out) for side, out in zip(sides, outs, strict=True))
    boxes, at = [], []
    for index, box in enumerate(way.receives):
        places = tuple(span.seen_from(-side.hull.start) for span, side in zip(box.target, sides, strict=True))
        if all(span.both(region) == span for span, region in zip(places, inside, strict=True)):
            boxes.append(index)
            at.append(tuple(span.seen_from(hull.start) for span, hull in zip(places, hulls, strict=True)))
    return Strip(
        tuple(out.seen_from(side.out.start) for out, side in zip(outs, sides, strict=True)),
        tuple(hull.size for hull in hulls),
        tuple(boxes),
        tuple(at),
    )
