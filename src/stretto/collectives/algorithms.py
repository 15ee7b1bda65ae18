"""The all-reduce algorithms by name."""

import sys
from collections.abc import Callable, Iterable

from stretto.collectives.library.double_tree import double_tree
from stretto.collectives.library.powers_of_two import rabenseifner, recursive_doubling
from stretto.collectives.library.ring import hierarchical, ring
from stretto.collectives.library.servers import parameter_server, single_master
from stretto.collectives.step import Plan, Step, without_empty
from stretto.errors import UsageError, nearest
from stretto.options.checks import is_among, shown, whole

ALGORITHMS: dict[str, Callable[[int, int, int], Iterable[Step]]] = {
    "single-master": single_master,
    "parameter-server": parameter_server,
    "ring": ring,
    "recursive-doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
    "double-tree": double_tree,
    "hierarchical": hierarchical,
}
NESTED = "hierarchical"


MOST_PROCESSES = 100_000


def check(algorithm: str, size: int, length: int, per_node: int | None) -> None:
    """Raise UsageError for an unknown algorithm, or sizes for which no plan can be made."""
    if not is_among(algorithm, ALGORITHMS):
        raise UsageError(f"algorithm={shown(algorithm)}: {nearest(str(algorithm), [*ALGORITHMS, 'auto'])}")
    whole("size", size, 1, MOST_PROCESSES)
    whole("length", length, 0, sys.maxsize)
    if per_node is not None:
        whole("per_node", per_node, 1)


def plan(algorithm: str, rank: int, size: int, length: int, *, per_node: int | None = None) -> Plan:
    """The steps of process `rank` of `size` in an all-reduce of `length` elements.

    `per_node` is for the hierarchical algorithm: how many consecutive ranks are a node. Raises UsageError for an
    unknown algorithm, for sizes out of range, and for a `per_node` that does not divide `size`.
    """
    check(algorithm, size, length, per_node)
    whole("rank", rank, 0, size - 1)
    if algorithm == NESTED:
        return without_empty(hierarchical(rank, size, length, per_node))
    if per_node is not None:
        raise UsageError(f"per_node={per_node} is for {NESTED!r} only, not for {algorithm!r}: leave it out")
    return without_empty(ALGORITHMS[algorithm](rank, size, length))


def plans(algorithm: str, size: int, length: int, *, per_node: int | None = None) -> list[Plan]:
    """The plan of each of `size` processes, by rank. Raises UsageError as `plan` does."""
    check(algorithm, size, length, per_node)
    return [plan(algorithm, rank, size, length, per_node=per_node) for rank in range(size)]
