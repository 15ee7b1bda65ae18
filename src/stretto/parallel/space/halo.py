"""The plan of a convolution that does not wait for its halos: integers only, no torch in here.

A convolution is linear in its input. So a process convolves its own rows first, with zeros for the halos, and adds the
halos' share to the outputs near a border when the halos have arrived. This needs no copy of the slab, and in backward
the gradients of the halos are sent first.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from stretto.parallel.space.geometry import RowRange, SlidingWindow, Window, cuts
from stretto.parallel.space.route import AxisRows, Block, Place, RowExchange, route


@dataclass(frozen=True)
class Strip:
    """The halo on one side: the outputs that it adds to, and their input buffer, which is zero except for the halo."""

    outs: Block  # in this process's output
    shape: tuple[int, ...]  # of the buffer, along the cut axes
    boxes: tuple[int, ...]  # which of the route's receives belong here
    at: tuple[Block, ...]  # the place of each of these boxes in the buffer


@dataclass(frozen=True)
class Halo:
    """One process's plan for a convolution whose halos are added afterwards."""

    padding: tuple[int, ...]  # of its own rows, along the cut axes
    strips: tuple[Strip, ...]
    exchange: RowExchange


@dataclass(frozen=True)
class AxisSlab:
    """One process's slab and output along one axis."""

    window: SlidingWindow
    size: int
    own: RowRange
    out: RowRange

    @property
    def hull(self) -> RowRange:
        """The input rows that its outputs see, including rows beyond the border."""
        return self.window.hull(self.out)

    @property
    def padding(self) -> int:
        """How many rows before its own its first output sees."""
        return self.own.start - self.hull.start

    @property
    def aligned(self) -> bool:
        """Whether a convolution of its own rows, padded equally on both sides, has exactly its outputs."""
        if self.padding < 0:
            return False
        symmetric = replace(self.window, before=self.padding, after=self.padding, ceil=False)
        return symmetric.outputs(self.own.size) == self.out.size

    @property
    def halos(self) -> tuple[RowRange, RowRange]:
        """The rows of other processes that its outputs see, before and after its own."""
        needed = self.hull.intersection(RowRange(0, self.size))
        return RowRange(needed.start, self.own.start), RowRange(self.own.stop, needed.stop)

    @property
    def outputs_touched(self) -> int:
        """The number of its outputs that see a halo, counted for each side."""
        return sum(self.window.outputs_touching(rows, self.out).size for rows in self.halos if rows.size)


def axis_rows(windows: tuple[Window, ...], sizes: tuple[int, ...], parts: tuple[int, ...]) -> tuple[AxisRows, ...]:
    """Along each axis, the input rows that every process has, and those that its outputs need."""
    return tuple(
        AxisRows(cuts(size, p), tuple(window.wanted(out, size) for out in cuts(window.outputs(size), p)))
        for window, size, p in zip(windows, sizes, parts, strict=True)
    )


@lru_cache(maxsize=1024)
def halo(
    windows: tuple[SlidingWindow, ...], sizes: tuple[int, ...], parts: tuple[int, ...], place: Place, max_touched: float
) -> Halo | None:
    """The plan of the process at `place`; None, on all processes, if one of them cannot add its halos afterwards.

    A process cannot where its slab is not `aligned` with its outputs, as with most strides and uneven cuts. Nor is it
    worth while where halos touch more than a share `max_touched` of the outputs along an axis.
    """
    axes = [
        [AxisSlab(window, size, *pair) for pair in zip(cuts(size, p), cuts(window.outputs(size), p), strict=True)]
        for window, size, p in zip(windows, sizes, parts, strict=True)
    ]
    if not all(side.aligned and side.outputs_touched <= max_touched * side.out.size for axis in axes for side in axis):
        return None
    sides = tuple(axis[at] for axis, at in zip(axes, place, strict=True))
    exchange = route(axis_rows(windows, sizes, parts), place)
    strips = tuple(
        strip(sides, exchange, axis, rows) for axis, side in enumerate(sides) for rows in side.halos if rows.size
    )
    assert sum(len(strip.boxes) for strip in strips) == len(exchange.receives), "a box belongs to one strip"
    return Halo(tuple(side.padding for side in sides), strips, exchange)


def strip(sides: tuple[AxisSlab, ...], exchange: RowExchange, axis: int, rows: RowRange) -> Strip:
    """The halo `rows` on one side of one axis.

    A corner belongs to the strip of its first axis: along later axes the strip includes it, along earlier axes the
    strip has own rows only.
    """
    region = tuple(
        rows if at == axis else side.hull.intersection(side.own if at < axis else RowRange(0, side.size))
        for at, side in enumerate(sides)
    )
    outs = tuple(side.window.outputs_covering(rows, side.out) for side, rows in zip(sides, region, strict=True))
    hulls = tuple(side.window.hull(out) for side, out in zip(sides, outs, strict=True))
    boxes, at = [], []
    for index, box in enumerate(exchange.receives):
        block = tuple(rows.relative_to(-side.hull.start) for rows, side in zip(box.target, sides, strict=True))
        if all(rows.intersection(within) == rows for rows, within in zip(block, region, strict=True)):
            boxes.append(index)
            at.append(tuple(rows.relative_to(hull.start) for rows, hull in zip(block, hulls, strict=True)))
    return Strip(
        tuple(out.relative_to(side.out.start) for out, side in zip(outs, sides, strict=True)),
        tuple(hull.size for hull in hulls),
        tuple(boxes),
        tuple(at),
    )
