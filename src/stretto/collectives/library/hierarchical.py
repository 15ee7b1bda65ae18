"""Two levels: a reduce-scatter inside each node, rings between the nodes, an all-gather inside each node.

node 0: 0 1 2     the parts a, b, c of the node's sum lie on its processes;
node 1: 3 4 5     0 and 3 agree on a, 1 and 4 on b, 2 and 5 on c; each node puts them together
"""

from collections.abc import Iterator
from math import isqrt

from stretto.collectives.library.ring import all_gather, around, reduce_scatter
from stretto.collectives.step import Step, whole
from stretto.errors import UsageError


def hierarchical(rank: int, size: int, length: int, per_node: int | None = None) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements; processes of a node have consecutive ranks."""
    node_size = nodes_of(size, per_node)
    place = rank % node_size
    node = range(rank - place, rank - place + node_size)
    everything = whole(length)
    yield from reduce_scatter(node, place, everything)
    yield from around(range(place, size, node_size), rank // node_size, everything.part(place, node_size))
    yield from all_gather(node, place, everything)


def nodes_of(size: int, per_node: int | None) -> int:
    """How many processes a node has: as asked, else the divisor of `size` that is next to its square root from below.

    Raises UsageError where nodes would not be alike.
    """
    divisors = [count for count in range(1, size + 1) if size % count == 0]
    if per_node is None:
        return max(count for count in divisors if count <= isqrt(size))
    if per_node not in divisors:
        raise UsageError(
            f"per_node={per_node} among {size} processes: nodes have to be alike; choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    return per_node
