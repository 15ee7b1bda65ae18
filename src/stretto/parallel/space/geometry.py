"""Which rows of an image a range of output rows needs: integers only, one axis at a time, without torch.

"Rows" are positions along whichever axis is cut. An image of n rows is cut over P processes as `torch.tensor_split`
cuts it, and so is every layer's output. The `hull` of an output range is the range of input rows that it needs; rows of
the hull beyond the image's border are padding. Rows of the hull that other processes have are the halos. They differ
from process to process, may be larger than a neighbour's slab, and may be empty.
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
        """The number of rows; 0 where the range is empty."""
        return max(self.stop - self.start, 0)

    def intersection(self, other: "RowRange") -> "RowRange":
        """The rows that both ranges have."""
        return RowRange(max(self.start, other.start), min(self.stop, other.stop))

    def relative_to(self, origin: int) -> "RowRange":
        """The same rows, counted from `origin`."""
        return RowRange(self.start - origin, self.stop - origin)


@lru_cache(maxsize=4096)
def cuts(size: int, parts: int) -> tuple[RowRange, ...]:
    """The rows of each of `parts` processes, as torch.tensor_split cuts `size` rows."""
    return tuple(RowRange(*bounds(size, part, parts)) for part in range(parts))


@dataclass(frozen=True)
class SlidingWindow:
    """The window of a convolution or a pool along one axis.

    Output row o sees input rows o t - p, o t - p + d, ..., o t - p + d (k - 1), where p is `before`. A negative padding
    crops the image. With `ceil`, pooling's last window may begin inside the image and end beyond its padding.
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
        """The number of output rows for `size` input rows (torch's pooling_output_shape)."""
        steps = size + self.before + self.after - self.reach
        count = (steps + (self.stride - 1 if self.ceil else 0)) // self.stride + 1
        if self.ceil and (count - 1) * self.stride >= size + self.before:
            count -= 1
        return count

    def hull(self, out: RowRange) -> RowRange:
        """The input rows that a range of output rows sees; rows below 0 and beyond the image are padding."""
        first = out.start * self.stride - self.before
        if out.size == 0:
            return RowRange(first, first)
        return RowRange(first, (out.stop - 1) * self.stride - self.before + self.reach)

    def wanted(self, out: RowRange, size: int) -> "Want":
        """The input rows for a range of output rows, of an image of `size` rows."""
        return want(self.hull(out), size)

    def outputs_touching(self, rows: RowRange, out: RowRange) -> RowRange:
        """The output rows in `out` whose window, from its first to its last row, overlaps `rows`."""
        first = -((self.reach - 1 - self.before - rows.start) // self.stride)
        return out.intersection(RowRange(first, (rows.stop - 1 + self.before) // self.stride + 1))

    def outputs_covering(self, rows: RowRange, out: RowRange) -> RowRange:
        """Those, and what more it takes for their `hull` to have all of `rows`: strides leave gaps between windows."""
        touching = self.outputs_touching(rows, out)
        first = (rows.start + self.before) // self.stride
        last = -((self.reach - self.before - rows.stop) // self.stride)
        return out.intersection(RowRange(min(touching.start, first), max(touching.stop, last + 1)))


@dataclass(frozen=True)
class TransposedWindow:
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
        """The number of output rows for `size` input rows."""
        return (size - 1) * self.stride - 2 * self.padding + self.reach + self.extra

    def hull(self, out: RowRange) -> RowRange:
        """The input rows that add to a range of output rows; empty where the stride leaves a gap."""
        first = -((self.reach - 1 - self.padding - out.start) // self.stride)
        return RowRange(first, (out.stop - 1 + self.padding) // self.stride + 1)

    def needed(self, out: RowRange, size: int) -> RowRange:
        """The input rows that add to a range of output rows; at least one, so that the convolution has an input."""
        rows = self.hull(out).intersection(RowRange(0, size))
        if rows.size:
            return rows
        nearest = min(max(rows.start, 0), size - 1)
        return RowRange(nearest, nearest + 1)

    def wanted(self, out: RowRange, size: int) -> "Want":
        """The input rows for a range of output rows, of an image of `size` rows."""
        return want(self.needed(out, size), size)

    def covered(self, rows: RowRange) -> RowRange:
        """The output rows that a range of input rows adds to; rows that `padding` crops are included."""
        first = rows.start * self.stride - self.padding
        return RowRange(first, first + (rows.size - 1) * self.stride + self.reach if rows.size else first)


@dataclass(frozen=True)
class CellWindow:
    """Adaptive pooling along one axis to `count` output rows, each of which sees a cell of the image."""

    count: int

    def outputs(self, size: int) -> int:
        """The number of output rows for `size` input rows."""
        return self.count

    def rows(self, out: RowRange, size: int) -> RowRange:
        every = cells(size, self.count)
        return RowRange(every[out.start].start, every[out.stop - 1].stop)

    def wanted(self, out: RowRange, size: int) -> "Want":
        """The input rows for a range of output rows, of an image of `size` rows."""
        return want(self.rows(out, size), size)


Window = SlidingWindow | TransposedWindow | CellWindow


class Segment(NamedTuple):
    """Rows of the image that a process wants; `at` is the buffer row where they begin."""

    source: RowRange
    at: int


@dataclass(frozen=True)
class Want:
    """The buffer that one process wants along one axis: `length` rows; rows in no segment hold the fill value."""

    length: int
    segments: tuple[Segment, ...]


@lru_cache(maxsize=4096)
def want(hull: RowRange, size: int) -> Want:
    """The buffer for a hull: rows of the image, and the fill value beyond its border."""
    rows = hull.intersection(RowRange(0, size))
    return Want(hull.size, (Segment(rows, rows.start - hull.start),) if rows.size else ())


def want_rows(sources: Iterable[int | None]) -> Want:
    """The buffer whose rows are these rows of the image; None stands for the fill value."""
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
    """The row of the image for each row of the padded image, as torch.nn.functional.pad; None where it is constant."""
    rows = range(-before, size + after)
    if mode == "replicate":
        return [min(max(row, 0), size - 1) for row in rows]
    if mode == "circular":
        return [row % size for row in rows]
    if mode == "reflect":
        return [size - 1 - abs(size - 1 - abs(row)) for row in rows]
    return [row if 0 <= row < size else None for row in rows]


def cells(size: int, count: int) -> tuple[RowRange, ...]:
    """The input rows of each output row of adaptive pooling: floor(o n / m) up to ceil((o + 1) n / m)."""
    return tuple(RowRange(o * size // count, -(-(o + 1) * size // count)) for o in range(count))
