"""Reduces any number of processes to a power of two: each process beyond it sends its elements to one of the core.

core of 4:   4 ─> 0    5 ─> 1           then 0 to 3 work             0 ─> 4    1 ─> 5
"""

from collections.abc import Callable, Iterator

from stretto.collectives.step import Step, all_elements


def core_of(size: int) -> int:
    """The largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def folded(work: Callable[[int, int, int], Iterator[Step]], rank: int, size: int, length: int) -> Iterator[Step]:
    """The steps of a process in the algorithm `work`, run by a core of a power of two of processes.

    The others send their elements to the core before, and receive the sum after.
    """
    core, everything = core_of(size), all_elements(length)
    if rank >= core:
        yield everything.send(rank - core)
        yield everything.set(rank - core)
        return
    if rank + core < size:
        yield everything.add(rank + core)
    yield from work(rank, core, length)
    if rank + core < size:
        yield everything.send(rank + core)
