"""Every process sends all elements to process 0, which adds them and sends the sum back.

1 ──┐        ┌─> 1
2 ──┼─> 0 ───┼─> 2      one after the other: process 0 has one port
3 ──┘        └─> 3
"""

from collections.abc import Iterator

from stretto.collectives.step import Step, all_elements

MASTER = 0


def single_master(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    everything = all_elements(length)
    if rank != MASTER:
        yield everything.send(MASTER)
        yield everything.set(MASTER)
        return
    others = [peer for peer in range(size) if peer != MASTER]
    for peer in others:
        yield everything.add(peer)
    for peer in others:
        yield everything.send(peer)
