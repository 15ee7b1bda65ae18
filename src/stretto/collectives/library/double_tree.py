"""Two binary trees, half of the elements each; whoever has children in one has none in the other (Sanders et al. 2009).

    first tree, size 6              second: mirrored (size even) or shifted by one (size odd)
             3                                2
        1         5                      4         0
       0 2       4                      5 3       1

Elements go up to be added and down to be known, in blocks: while one is on its way, the next ones follow. Steps are in
the order of a common clock: block k goes up from depth d at k + D - d and down to depth d at k + D + d - 1, D being the
trees' depth. At each time edges of one color come first, up before down, so that a process sends one message and
receives one at a time; and nobody can wait for each other in a circle.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from stretto.collectives.step import SEND, Step, whole

BLOCK = 1 << 15  # elements of a tree's block at which latency no longer counts
MOST_BLOCKS = 16
UP, DOWN = 0, 1


class TreeNode(NamedTuple):
    """One process in one tree."""

    parent: int | None
    children: tuple[int, ...]
    depth: int  # 0 is the root


def double_tree(rank: int, size: int, length: int) -> Iterator[Step]:
    """The plan of process `rank` of `size`, for `length` elements."""
    if size == 1:
        return iter(())
    timed = []
    depth, color = size.bit_length() - 1, colors(size)
    blocks = blocks_of(length)
    for tree in (0, 1):
        place = place_of(rank, size, tree)
        half = whole(length).part(tree, 2)
        for k in range(blocks):
            block, rise, fall = half.part(k, blocks), k + depth - place.depth, k + depth + place.depth
            if place.parent is not None:
                timed.append((rise, color[rank, tree], UP, block.send(place.parent)))
                timed.append((fall - 1, color[rank, tree], DOWN, block.set(place.parent)))
            for child in place.children:
                timed.append((rise - 1, color[child, tree], UP, block.add(child)))
                timed.append((fall, color[child, tree], DOWN, block.send(child)))
    timed.sort(key=lambda each: (each[:3], each[3].kind != SEND))
    return (step for *_, step in timed)


def blocks_of(length: int) -> int:
    """Into how many blocks each half of so many elements is cut."""
    return max(1, min(MOST_BLOCKS, length // 2 // BLOCK))


def place_of(rank: int, size: int, tree: int) -> TreeNode:
    """Where a process stands in one of the two trees."""
    if tree == 0:
        node, shift, sign = rank + 1, -1, 1
    elif size % 2 == 0:
        node, shift, sign = size - rank, size, -1
    else:
        node, shift, sign = rank or size, 0, 1
    parent, here, depth = None, 1 << (size.bit_length() - 1), 0
    while here != node:
        parent, depth = here, depth + 1
        here = children(here, size)[node > here]
    below = tuple((shift + sign * child) % size for child in children(node, size))
    return TreeNode(None if parent is None else (shift + sign * parent) % size, below, depth)


def children(node: int, size: int) -> tuple[int, ...]:
    """Below a node of the tree in order on 1 to `size`, whose odd numbers are leaves: the left, then the right one."""
    half = (node & -node) // 2
    if not half:
        return ()
    left = node - half
    while half and node + half > size:
        half //= 2
    return (left, node + half) if half else (left,)


@lru_cache(maxsize=64)
def colors(size: int) -> dict[tuple[int, int], int]:
    """0 or 1 for the edge above (process, tree): two that meet at a port at the same time have different ones.

    That are the two edges above a process, and those to the children of one parent: rows of edges that never branch.
    """
    places = [[place_of(rank, size, tree) for rank in range(size)] for tree in (0, 1)]

    def beside(edge: tuple[int, int]) -> list[tuple[int, int]]:
        rank, tree = edge
        parent = places[tree][rank].parent
        siblings = () if parent is None else places[tree][parent].children
        other = [(rank, 1 - tree)] if places[1 - tree][rank].parent is not None else []
        return other + [(child, tree) for child in siblings if child != rank]

    found: dict[tuple[int, int], int] = {}
    for first in ((rank, tree) for tree in (0, 1) for rank in range(size) if places[tree][rank].parent is not None):
        if first in found:
            continue
        found[first], row = 0, [first]
        while row:
            edge = row.pop()
            for neighbour in beside(edge):
                if neighbour not in found:
                    found[neighbour] = 1 - found[edge]
                    row.append(neighbour)
    return found
