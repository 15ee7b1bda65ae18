"""What travels between the processes of a grid so that each has the rows it wants: whole numbers only, no torch.

Axes are independent: a box that goes from one process to another is, along each axis, a segment of what the receiver
wants within what the sender has. So corners need no second round, and all messages of a layer are under way at once.
The sender and the receiver list the boxes between them in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from stretto.parallel.space.geometry import RowRange, Want

Place = tuple[int, ...]  # a process's coordinates in the grid
Block = tuple[RowRange, ...]  # one span an axis


@dataclass(frozen=True)
class AxisRows:
    """One cut axis: which rows each part of the grid has, and which it wants."""

    own: tuple[RowRange, ...]
    wants: tuple[Want, ...]


class Box(NamedTuple):
    """What one process sends another: rows of the sender's slab, and where they go in the receiver's buffer."""

    peer: int  # its rank in the grid, row by row
    source: Block
    target: Block


@dataclass(frozen=True)
class RowExchange:
    """One process's part in an exchange."""

    shape: tuple[int, ...]  # of its buffer, along the cut axes
    keep: tuple[Box, ...]  # from its own slab
    sends: tuple[Box, ...]
    receives: tuple[Box, ...]
    full: bool  # nothing of the buffer is left to be filled
    same: bool  # the buffer is this process's slab


@lru_cache(maxsize=4096)
def route(lines: tuple[AxisRows, ...], place: Place) -> RowExchange:
    """The part of the process at `place`."""
    places = list(product(*(range(len(line.own)) for line in lines)))
    keep = tuple(boxes(lines, place, place, 0))
    others = [(rank, other) for rank, other in enumerate(places) if other != place]
    sends = tuple(box for rank, other in others for box in boxes(lines, place, other, rank))
    receives = tuple(box for rank, other in others for box in boxes(lines, other, place, rank))
    shape = tuple(line.wants[part].length for line, part in zip(lines, place, strict=True))
    slab = tuple(RowRange(0, line.own[part].size) for line, part in zip(lines, place, strict=True))
    whole = all(
        sum(segment.source.size for segment in line.wants[part].segments) == line.wants[part].length
        for line, part in zip(lines, place, strict=True)
    )
    same = len(keep) == 1 and keep[0].source == keep[0].target == slab and shape == tuple(s.size for s in slab)
    return RowExchange(shape, keep, sends, receives, whole, same)


def boxes(lines: tuple[AxisRows, ...], sender: Place, receiver: Place, peer: int) -> Iterator[Box]:
    """What `sender` has of what `receiver` wants."""
    pieces = [list(along(line, *pair)) for line, *pair in zip(lines, sender, receiver, strict=True)]
    for chosen in product(*pieces):
        yield Box(peer, tuple(source for source, _ in chosen), tuple(target for _, target in chosen))


def along(line: AxisRows, sender: int, receiver: int) -> Iterator[tuple[RowRange, RowRange]]:
    """The same along one axis: rows of the sender's slab, rows of the receiver's buffer."""
    own = line.own[sender]
    for segment in line.wants[receiver].segments:
        rows = segment.source.both(own)
        if rows.size:
            yield rows.seen_from(own.start), rows.seen_from(segment.source.start - segment.at)
