"""Two binary trees, each for half of the elements; an inner node of one is a leaf of the other (Sanders et al. 2009).

    first tree, size 6              second: mirrored (size even) or shifted by one (size odd)
             3                                2
        1         5                      4         0
       0 2       4                      5 3       1

Elements go up a tree to be added, and their sum goes down to all, in blocks that follow one another. Steps are in the
order of a common clock: block k goes up from depth d at k + D - d and down to depth d at k + D + d - 1, D being the
trees' depth. At each time edges of one color come first, up before down, so that a process sends one message and
receives one at a time, and no cycle of processes can wait for one another.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from stretto.collectives.step import SEND, Step, all_elements

BLOCK = 1 << 15  # elements of a block; in larger blocks latency is negligible
MOST_BLOCKS = 16
UP, DOWN = 0, 1


class TreeNode(NamedTuple):
    """One process in one tree: the ranks of its parent (None for the root) and its children, and its depth."""

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
        node = node_of(rank, size, tree)
        half = all_elements(length).part(tree, 2)
        for k in range(blocks):
            block, rise, fall = half.part(k, blocks), k + depth - node.depth, k + depth + node.depth
            if node.parent is not None:
                timed.append((rise, color[rank, tree], UP, block.send(node.parent)))
                timed.append((fall - 1, color[rank, tree], DOWN, block.set(node.parent)))
            for child in node.children:
                timed.append((rise - 1, color[child, tree], UP, block.add(child)))
                timed.append((fall, color[child, tree], DOWN, block.send(child)))
    timed.sort(key=lambda entry: (entry[:3], entry[3].kind != SEND))
    return (step for *_, step in timed)


def blocks_of(length: int) -> int:
    """The number of blocks into which each half of `length` elements is cut."""
    return max(1, min(MOST_BLOCKS, length // 2 // BLOCK))


def node_of(rank: int, size: int, tree: int) -> TreeNode:
    """The node of a process in tree 0 or 1."""
    if tree == 0:
        node, shift, sign = rank + 1, -1, 1
    elif size % 2 == 0:
        node, shift, sign = size - rank, size, -1
    else:
        node, shift, sign = rank or size, 0, 1
    parent, current, depth = None, 1 << (size.bit_length() - 1), 0
    while current != node:
        parent, depth = current, depth + 1
        current = children(current, size)[node > current]
    ranks = tuple((shift + sign * child) % size for child in children(node, size))
    return TreeNode(None if parent is None else (shift + sign * parent) % size, ranks, depth)


def children(node: int, size: int) -> tuple[int, ...]:
    """The left and the right child of a node in the search tree on 1 to `size`, or the left one, or none.

    Odd numbers are leaves.
    """
    half = (node & -node) // 2
    if not half:
        return ()
    left = node - half
    while half and node + half > size:
        half //= 2
    return (left, node + half) if half else (left,)


@lru_cache(maxsize=64)
def colors(size: int) -> dict[tuple[int, int], int]:
    """A color, 0 or 1, for the edge above each (process, tree); edges that use a port at the same time differ.

    Such edges are the two above a process, and the two to the children of one parent. They form chains that never
    branch, so two colors suffice.
    """
    nodes = [[node_of(rank, size, tree) for rank in range(size)] for tree in (0, 1)]

    def neighbours(edge: tuple[int, int]) -> list[tuple[int, int]]:
        rank, tree = edge
        parent = nodes[tree][rank].parent
        siblings = () if parent is None else nodes[tree][parent].children
        other = [(rank, 1 - tree)] if nodes[1 - tree][rank].parent is not None else []
        return other + [(child, tree) for child in siblings if child != rank]

    color: dict[tuple[int, int], int] = {}
    for first in ((rank, tree) for tree in (0, 1) for rank in range(size) if nodes[tree][rank].parent is not None):
        if first in color:
            continue
        color[first], pending = 0, [first]
        while pending:
            edge = pending.pop()
            for neighbour in neighbours(edge):
                if neighbour not in color:
                    color[neighbour] = 1 - color[edge]
                    pending.append(neighbour)
    return color
