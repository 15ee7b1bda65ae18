"""Each process is the server of one part: it gets that part from all others, adds, and sends the sum to all.

Processes begin with different peers, so that no process gets two messages at once: in round k process r sends to r + k
and receives from r - k.
"""

from collections.abc import Iterator

from stretto.collectives.step import Step, all_elements


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
