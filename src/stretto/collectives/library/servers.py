"""Sums at servers: at process 0 alone, or each part of the elements at a process of its own.

Single master: every process sends all elements to process 0, which adds them and sends the sum back.

1 ──┐        ┌─> 1
2 ──┼─> 0 ───┼─> 2      one after the other: process 0 has one port
3 ──┘        └─> 3

Parameter server: each process is the server of one part. It gets that part from all others, adds, and sends the sum to
all. Processes begin with different peers, so that no process gets two messages at once: in round k process r sends to
r + k and receives from r - k.
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


def parameter_server(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    everything = all_elements(length)
    served = everything.part(rank, size)
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        yield everything.part(to, size).send(to)
        yield served.add(source)
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        yield served.send(to)
        yield everything.part(source, size).set(source)
