"""Recursive halving, then recursive doubling (Rabenseifner 2004): as few rounds as a tree, as few bytes as a ring.

Process 5 (binary 101) of eight, with parts 0 to 7:

halving    sends 0-3 to 1, keeps 4-7;   sends 6-7 to 7, keeps 4-5;   sends 4 to 4, keeps 5, now the sum
doubling   gets 4 from 4;   gets 6-7 from 7;   gets 0-3 from 1
"""

from collections.abc import Iterator

from stretto.collectives.library.folding import folded
from stretto.collectives.step import Step, all_elements


def rabenseifner(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    return folded(halving_doubling, rank, size, length)


def halving_doubling(rank: int, core: int, length: int) -> Iterator[Step]:
    """The steps of process `rank` of `core`, a power of two."""
    everything, first, last = all_elements(length), 0, core
    halves = []
    while last - first > 1:
        distance, middle = (last - first) // 2, (first + last) // 2
        lower, upper = everything.parts(first, middle, core), everything.parts(middle, last, core)
        first, last = (middle, last) if rank & distance else (first, middle)
        kept, sent = (upper, lower) if rank & distance else (lower, upper)
        halves.append((rank ^ distance, kept, sent))
        yield sent.send(rank ^ distance)
        yield kept.add(rank ^ distance)
    for peer, kept, sent in reversed(halves):
        yield kept.send(peer)
        yield sent.set(peer)
