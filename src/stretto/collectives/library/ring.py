"""Parts travel around a ring: once to be added up, once more to be known by all (Patarasu and Yuan 2009).

         reduce-scatter                    all-gather
process  0    1    2                       0    1    2
sends    c ─> a ─> b ─> (to 0)             a ─> b ─> c ─>
         b ─> c ─> a ─>                    c ─> a ─> b ─>
has      sum of a, of b, of c              everything
"""

from collections.abc import Iterator, Sequence

from stretto.collectives.step import Step, Stretch, whole


def ring(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    yield from around(range(size), rank, whole(length))


def around(ranks: Sequence[int], place: int, stretch: Stretch) -> Iterator[Step]:
    """An all-reduce of a stretch among some processes, for the one that is `ranks[place]`."""
    yield from reduce_scatter(ranks, place, stretch)
    yield from all_gather(ranks, place, stretch)


def reduce_scatter(ranks: Sequence[int], place: int, stretch: Stretch) -> Iterator[Step]:
    """At the end the process at a place has the sum of the part with the number of that place."""
    size = len(ranks)
    following, previous = ranks[(place + 1) % size], ranks[place - 1]
    for k in range(1, size):
        yield stretch.part((place - k) % size, size).send(following)
        yield stretch.part((place - k - 1) % size, size).add(previous)


def all_gather(ranks: Sequence[int], place: int, stretch: Stretch) -> Iterator[Step]:
    """The process at each place begins with the part of that number; at the end all have all of them."""
    size = len(ranks)
    following, previous = ranks[(place + 1) % size], ranks[place - 1]
    for k in range(size - 1):
        yield stretch.part((place - k) % size, size).send(following)
        yield stretch.part((place - k - 1) % size, size).set(previous)
