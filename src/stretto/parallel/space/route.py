"""Which rows the processes of a grid send each other, so that each has the rows it wants: integers only, no torch.

Axes are independent: along each axis, a box from one process to another is a segment that the receiver wants,
intersected with the rows of the sender. So corners need no second round, and all messages of a layer are under way at
once. The sender and the receiver list the boxes between them in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from stretto.parallel.space.geometry import RowRange, Want

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
    """The exchange as the process at `place` sees it."""
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
