"""All elements are exchanged with a process at distance 1, 2, 4, ...: the fewest rounds, for small tensors.

0 <─> 1    2 <─> 3         each adds the other's values: both get the same sum, to the last bit,
0 <───────> 2   1 <─> 3    because a + b = b + a
"""

from collections.abc import Iterator

from stretto.collectives.library.folding import folded
from stretto.collectives.step import Step, all_elements


def recursive_doubling(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    return folded(exchanges, rank, size, length)


def exchanges(rank: int, core: int, length: int) -> Iterator[Step]:
    """The steps of process `rank` of `core`, a power of two."""
    distance = 1
    while distance < core:
        yield all_elements(length).send(rank ^ distance)
        yield all_elements(length).add(rank ^ distance)
        distance *= 2
