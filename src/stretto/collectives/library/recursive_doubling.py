"""Everything is exchanged with a process at distance 1, 2, 4, ...: the fewest rounds, for small tensors.

0 <─> 1    2 <─> 3         each adds what the other has: both come to the same sum, to the last bit,
0 <───────> 2   1 <─> 3    because a + b = b + a
"""

from collections.abc import Iterator

from stretto.collectives.library.folding import folded
from stretto.collectives.step import Step, whole


def recursive_doubling(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    return folded(exchanges, rank, size, length)


def exchanges(rank: int, core: int, length: int) -> Iterator[Step]:
    """Among a power of two of processes."""
    distance = 1
    while distance < core:
        yield whole(length).send(rank ^ distance)
        yield whole(length).add(rank ^ distance)
        distance *= 2
