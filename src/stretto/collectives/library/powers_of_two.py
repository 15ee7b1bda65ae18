"""Recursive doubling, and halving before it, on a core of a power of two of processes; the others send to one of it.

core of 4:   4 ─> 0    5 ─> 1           then 0 to 3 work             0 ─> 4    1 ─> 5

Recursive doubling: all elements are exchanged with a process at distance 1, 2, 4, ...: the fewest rounds, for small
tensors.

0 <─> 1    2 <─> 3         each adds the other's values: both get the same sum, to the last bit,
0 <───────> 2   1 <─> 3    because a + b = b + a

Rabenseifner (2004): recursive halving, then recursive doubling: as few rounds as a tree, as few bytes as a ring.
Process 5 (binary 101) of eight, with parts 0 to 7:

halving    sends 0-3 to 1, keeps 4-7;   sends 6-7 to 7, keeps 4-5;   sends 4 to 4, keeps 5, now the sum
doubling   gets 4 from 4;   gets 6-7 from 7;   gets 0-3 from 1
"""

from collections.abc import Callable, Iterator

from stretto.collectives.step import Step, all_elements


def folded(work: Callable[[int, int, int], Iterator[Step]], rank: int, size: int, length: int) -> Iterator[Step]:
    """The steps of a process in the algorithm `work`, run by a core of a power of two of processes.

    The others send their elements to the core before, and receive the sum after.
    """
    core = 1 << (size.bit_length() - 1)  # the largest power of two up to size
    everything = all_elements(length)
    if rank >= core:
        yield everything.send(rank - core)
        yield everything.set(rank - core)
        return
    if rank + core < size:
        yield everything.add(rank + core)
    yield from work(rank, core, length)
    if rank + core < size:
        yield everything.send(rank + core)


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
