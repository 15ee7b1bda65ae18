"""Two levels: a reduce-scatter inside each node, rings between the nodes, an all-gather inside each node.

node 0: 0 1 2     after the reduce-scatter each process has one part, a, b or c, of its node's sum;
node 1: 3 4 5     0 and 3 then sum a, 1 and 4 sum b, 2 and 5 sum c; each node gathers the parts
"""

from collections.abc import Iterator
from math import isqrt

from stretto.collectives.library.ring import all_gather, reduce_scatter, ring_all_reduce
from stretto.collectives.step import Step, all_elements
from stretto.errors import UsageError


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
