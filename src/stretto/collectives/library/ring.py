"""Parts travel around a ring twice: first to be summed, then to reach all processes (Patarasu and Yuan 2009).

         reduce-scatter                    all-gather
process  0    1    2                       0    1    2
sends    c ─> a ─> b ─> (to 0)             a ─> b ─> c ─>
         b ─> c ─> a ─>                    c ─> a ─> b ─>
has      sum of a, of b, of c              everything

Hierarchical, two levels: a reduce-scatter inside each node, rings between the nodes, an all-gather inside each node.

node 0: 0 1 2     after the reduce-scatter each process has one part, a, b or c, of its node's sum;
node 1: 3 4 5     0 and 3 then sum a, 1 and 4 sum b, 2 and 5 sum c; each node gathers the parts
"""

from collections.abc import Iterator, Sequence
from math import isqrt

from stretto.collectives.step import ElementRange, Step, all_elements
from stretto.errors import UsageError


def ring(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    yield from ring_all_reduce(range(size), rank, all_elements(length))


def ring_all_reduce(ranks: Sequence[int], position: int, elements: ElementRange) -> Iterator[Step]:
    """The steps of process `ranks[position]` in an all-reduce of `elements` among the processes `ranks`."""
    yield from reduce_scatter(ranks, position, elements)
    yield from all_gather(ranks, position, elements)


def reduce_scatter(ranks: Sequence[int], position: int, elements: ElementRange) -> Iterator[Step]:
    """The steps of process `ranks[position]`, which ends with the sum of part number `position` of `elements`."""
    size = len(ranks)
    following, previous = ranks[(position + 1) % size], ranks[position - 1]
    for k in range(1, size):
        yield elements.part((position - k) % size, size).send(following)
        yield elements.part((position - k - 1) % size, size).add(previous)


def all_gather(ranks: Sequence[int], position: int, elements: ElementRange) -> Iterator[Step]:
    """The steps of process `ranks[position]`, which begins with part number `position` and ends with all `elements`."""
    size = len(ranks)
    following, previous = ranks[(position + 1) % size], ranks[position - 1]
    for k in range(size - 1):
        yield elements.part((position - k) % size, size).send(following)
        yield elements.part((position - k - 1) % size, size).set(previous)


def hierarchical(rank: int, size: int, length: int, per_node: int | None = None) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements; processes of a node have consecutive ranks."""
    node_size = nodes_of(size, per_node)
    position = rank % node_size
    node = range(rank - position, rank - position + node_size)
    everything = all_elements(length)
    part = everything.part(position, node_size)
    yield from reduce_scatter(node, position, everything)
    yield from ring_all_reduce(range(position, size, node_size), rank // node_size, part)
    yield from all_gather(node, position, everything)


def nodes_of(size: int, per_node: int | None) -> int:
    """The number of processes in a node: `per_node`, else the largest divisor of `size` up to its square root.

    Raises UsageError if `per_node` does not divide `size`.
    """
    divisors = [count for count in range(1, size + 1) if size % count == 0]
    if per_node is None:
        return max(count for count in divisors if count <= isqrt(size))
    if per_node not in divisors:
        raise UsageError(
            f"per_node={per_node} among {size} processes: all nodes must have the same number of processes; choose one "
            f"of {', '.join(map(str, divisors))}"
        )
    return per_node
