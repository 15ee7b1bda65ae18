"""Which rows of an image a range of output rows needs: whole numbers only, one axis at a time, no torch in here.

"Rows" stand for positions along whichever axis is cut. An image of n rows lies on P processes as `torch.tensor_split`
cuts it, and so does every layer's output. A layer says which input rows an output range needs (its `hull`, which may
reach over the border: that is padding); what is not among a process's own rows are its halos. They differ from process
to process, may be wider than a neighbour, and may be empty.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from stretto.schedule.even_split import bounds


class RowRange(NamedTuple):
    """Rows from `start` up to, not including, `stop`; empty where stop <= start."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many rows there are; 0 where the range is empty."""
        return max(self.stop - self.start, 0)

    def both(self, other: "RowRange") -> "RowRange":
        """The rows that are in both."""
        return RowRange(max(self.start, other.start), min(self.stop, other.stop))

    def seen_from(self, origin: int) -> "RowRange":
        """The same rows, counted from `origin`."""
        return RowRange(self.start - origin, self.stop - origin)


@lru_cache(maxsize=4096)
def cuts(size: int, parts: int) -> tuple[RowRange, ...]:
    """The rows of each process, as torch.tensor_split cuts."""
    return tuple(RowRange(*bounds(size, part, parts)) for part in range(parts))


@dataclass(frozen=True)
class SlidingWindow:
    """A window that slides over an image: convolution and pooling along one axis.

    Output row o sees input rows o t - p, o t - p + d, ..., o t - p + d (k - 1), where p is `before`. A negative padding
    crops. With `ceil`, pooling's last window may begin inside the image and end beyond its padding.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Rows from the first to the last that one output row sees."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int) -> int:
        """How many output rows an image of `size` rows has (torch's pooling_output_shape)."""
        free = size + self.before + self.after - self.reach
        count = (free + (self.stride - 1 if self.ceil else 0)) // self.stride + 1
        if self.ceil and (count - 1) * self.stride >= size + self.before:
            count -= 1
        return count

    def hull(self, out: RowRange) -> RowRange:
        """The input rows that a range of output rows sees; negative ones and those beyond the image are padding."""
        first = out.start * self.stride - self.before
        if out.size == 0:
            return RowRange(first, first)
        return RowRange(first, (out.stop - 1) * self.stride - self.before + self.reach)

    def seen(self, rows: RowRange, out: RowRange) -> RowRange:
        """Those outputs in `out` whose window, from its first to its last row, touches `rows`."""
        first = -((self.reach - 1 - self.before - rows.start) // self.stride)
        return out.both(RowRange(first, (rows.stop - 1 + self.before) // self.stride + 1))


@dataclass(frozen=True)
class Spread:
    """A transposed convolution along one axis: input row i adds to output rows i t - p + d j, j < k."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    extra: int = 0  # torch's output_padding

    @property
    def reach(self) -> int:
        """Rows from the first to the last that one input row adds to."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int) -> int:
        """How many output rows an image of `size` rows has."""
        return (size - 1) * self.stride - 2 * self.padding + self.reach + self.extra

    def hull(self, out: RowRange) -> RowRange:
        """The input rows that add to a range of output rows; empty where the stride leaves a gap."""
        first = -((self.reach - 1 - self.padding - out.start) // self.stride)
        return RowRange(first, (out.stop - 1 + self.padding) // self.stride + 1)

    def covered(self, rows: RowRange) -> RowRange:
        """The output rows, border included, that a range of input rows makes without padding."""
        first = rows.start * self.stride - self.padding
        return RowRange(first, first + (rows.size - 1) * self.stride + self.reach if rows.size else first)


class Segment(NamedTuple):
    """Rows of the image that a process wants, and where in its buffer they go."""

    source: RowRange
    at: int


@dataclass(frozen=True)
class Want:
    """What one process wants along one axis: a buffer of `length` rows; those that no segment names are filled."""

    length: int
    segments: tuple[Segment, ...]


@lru_cache(maxsize=4096)
def want(hull: RowRange, size: int) -> Want:
    """A hull as it stands: rows within the image, filled beyond its border."""
    inside = hull.both(RowRange(0, size))
    return Want(hull.size, (Segment(inside, inside.start - hull.start),) if inside.size else ())


def want_rows(sources: Iterable[int | None]) -> Want:
    """One row of the image for each row of the buffer, None where it is filled: neighbours make one segment."""
    segments: list[Segment] = []
    length = 0
    for length, row in enumerate(sources, start=1):
        at = length - 1
        if row is None:
            continue
        if segments and segments[-1].source.stop == row and segments[-1].at + segments[-1].source.size == at:
            segments[-1] = Segment(RowRange(segments[-1].source.start, row + 1), segments[-1].at)
        else:
            segments.append(Segment(RowRange(row, row + 1), at))
    return Want(length, tuple(segments))


def padded_rows(size: int, before: int, after: int, mode: str) -> list[int | None]:
    """Which row of the image each row of a padded one is, as torch.nn.functional.pad has it."""
    rows = range(-before, size + after)
    if mode == "replicate":
        return [min(max(row, 0), size - 1) for row in rows]
    if mode == "circular":
        return [row % size for row in rows]
    if mode == "reflect":
        return [size - 1 - abs(size - 1 - abs(row)) for row in rows]
    return [row if 0 <= row < size else None for row in rows]


def cells(size: int, count: int) -> tuple[RowRange, ...]:
    """The rows that each output row of adaptive pooling sees: floor(o n / m) up to ceil((o + 1) n / m)."""
    return tuple(RowRange(o * size // count, -(-(o + 1) * size // count)) for o in range(count))
