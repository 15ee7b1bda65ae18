"""Any number of processes made a power of two: those that are too many give all they have to one of the others each.

core of 4:   4 ─> 0    5 ─> 1           then 0 to 3 work             0 ─> 4    1 ─> 5
"""

from collections.abc import Callable, Iterator

from stretto.collectives.step import Step, whole


def core_of(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def folded(work: Callable[[int, int, int], Iterator[Step]], rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan `work` of the core, with the rest of the processes around it."""
    core, everything = core_of(size), whole(length)
    if rank >= core:
        yield everything.send(rank - core)
        yield everything.set(rank - core)
        return
    if rank + core < size:
        yield everything.add(rank + core)
    yield from work(rank, core, length)
    if rank + core < size:
        yield everything.send(rank + core)
