"""Parts travel around a ring twice: first to be summed, then to reach all processes (Patarasu and Yuan 2009).

         reduce-scatter                    all-gather
process  0    1    2                       0    1    2
sends    c ─> a ─> b ─> (to 0)             a ─> b ─> c ─>
         b ─> c ─> a ─>                    c ─> a ─> b ─>
has      sum of a, of b, of c              everything
"""

from collections.abc import Iterator, Sequence

from stretto.collectives.step import ElementRange, Step, all_elements


def ring(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    yield from ring_all_reduce(range(size), rank, all_elements(length))


def ring_all_reduce(ranks: Sequence[int], position: int, elements: ElementRange) -> Iterator[Step]:
    """The steps of process `ranks[position]` in an all-reduce of `elements` among the processes `ranks`."""
    yield from reduce_scatter(ranks, position, elements)
    yield from all_gather(ranks, position, elements)


def reduce_scatter(ranks: Sequence[int], position: int, elements: ElementRange) -> Iterator[Step]:
    """The steps of process `ranks[position]`, which ends with the sum of part number `position` of `elements`."""
    size = len(ranks)
    following, previous = ranks[(position + 1) % size], ranks[position - 1]
    for k in range(1, size):
        yield elements.part((position - k) % size, size).send(following)
        yield elements.part((position - k - 1) % size, size).add(previous)


def all_gather(ranks: Sequence[int], position: int, elements: ElementRange) -> Iterator[Step]:
    """The steps of process `ranks[position]`, which begins with part number `position` and ends with all `elements`."""
    size = len(ranks)
    following, previous = ranks[(position + 1) % size], ranks[position - 1]
    for k in range(size - 1):
        yield elements.part((position - k) % size, size).send(following)
        yield elements.part((position - k - 1) % size, size).set(previous)
