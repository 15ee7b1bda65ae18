"""Which rows the processes of a grid send each other, so that each has the rows it wants: integers only, no torch.

Axes are independent: along each axis, a box from one process to another is a segment that the receiver wants,
intersected with the rows of the sender. So corners need no second round, and all messages of a layer are under way at
once. The sender and the receiver list the boxes between them in the same order.

The plan of a convolution that does not wait for its halos: integers only, no torch in here.

A convolution is linear in its input. So a process convolves its own rows first, with zeros for the halos, and adds the
halos' share to the outputs near a border when the halos have arrived. This needs no copy of the slab, and in backward
the gradients of the halos are sent first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from stretto.parallel.space.geometry import RowRange, SlidingWindow, Want, Window, cuts

Place = tuple[int, ...]  # a process's coordinates in the grid
Block = tuple[RowRange, ...]  # the rows along each cut axis


@dataclass(frozen=True)
class AxisRows:
    """Along one cut axis: the rows that each part of the grid has, and the buffer that it wants."""

    own: tuple[RowRange, ...]
    wants: tuple[Want, ...]


class Box(NamedTuple):
    """Rows that one process sends another: `source` in the sender's slab, `target` in the receiver's buffer."""

    peer: int  # the other process's rank in the grid, row by row
    source: Block
    target: Block


@dataclass(frozen=True)
class RowExchange:
    """The boxes of one process: copied from its own slab, sent and received."""

    shape: tuple[int, ...]  # of its buffer, along the cut axes
    keep: tuple[Box, ...]  # copied from its own slab
    sends: tuple[Box, ...]
    receives: tuple[Box, ...]
    full: bool  # boxes cover the whole buffer: no row holds the fill value
    same: bool  # the buffer equals this process's slab


@lru_cache(maxsize=4096)
def route(axis_rows: tuple[AxisRows, ...], place: Place) -> RowExchange:
    places = list(product(*(range(len(axis.own)) for axis in axis_rows)))
    keep = tuple(boxes(axis_rows, place, place, 0))
    others = [(rank, other) for rank, other in enumerate(places) if other != place]
    sends = tuple(box for rank, other in others for box in boxes(axis_rows, place, other, rank))
    receives = tuple(box for rank, other in others for box in boxes(axis_rows, other, place, rank))
    shape = tuple(axis.wants[part].length for axis, part in zip(axis_rows, place, strict=True))
    slab = tuple(RowRange(0, axis.own[part].size) for axis, part in zip(axis_rows, place, strict=True))
    whole = all(
        sum(segment.source.size for segment in axis.wants[part].segments) == axis.wants[part].length
        for axis, part in zip(axis_rows, place, strict=True)
    )
    same = len(keep) == 1 and keep[0].source == keep[0].target == slab and shape == tuple(s.size for s in slab)
    return RowExchange(shape, keep, sends, receives, whole, same)


def boxes(axis_rows: tuple[AxisRows, ...], sender: Place, receiver: Place, peer: int) -> Iterator[Box]:
    """The boxes from `sender` to `receiver`; `peer` is the rank that they carry."""
    pieces = [list(overlaps(axis, *pair)) for axis, *pair in zip(axis_rows, sender, receiver, strict=True)]
    for box in product(*pieces):
        yield Box(peer, tuple(source for source, _ in box), tuple(target for _, target in box))


def overlaps(axis: AxisRows, sender: int, receiver: int) -> Iterator[tuple[RowRange, RowRange]]:
    """Along one axis: rows of the sender's slab that the receiver wants, and where they go in its buffer."""
    own = axis.own[sender]
    for segment in axis.wants[receiver].segments:
        rows = segment.source.intersection(own)
        if rows.size:
            yield rows.relative_to(own.start), rows.relative_to(segment.source.start - segment.at)


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
    """Along each axis, the input rows of every process, and the rows that its outputs need."""
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
