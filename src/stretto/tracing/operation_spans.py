"""The operations inside an action: spans of the lane "operation", each within the action that ran it."""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from stretto.tracing.recording import Span

OPERATION = "operation"  # the lane
PROFILED = "profile"  # the lane of the steps that ran under a profiler, and were slower for it


def by_action(actions: Sequence[Span], operations: Sequence[Span]) -> list[list[Span]]:
    """The operations of each action, outer ones first, cut off at its ends: clocks agree to some microseconds.

    An operation belongs to the action in which its middle lies; one that lies in none is left out. Actions are in
    order and do not overlap.
    """
    found: list[list[Span]] = [[] for _ in actions]
    starts = [action.start for action in actions]
    for operation in sorted(operations, key=lambda span: (span.start, -span.end)):
        middle = (operation.start + operation.end) // 2
        at = bisect_right(starts, middle) - 1
        if at >= 0 and middle < actions[at].end:
            start, end = max(operation.start, actions[at].start), min(operation.end, actions[at].end)
            found[at].append(operation._replace(start=start, end=end))
    return [nested(inside) for inside in found]


def nested(operations: Sequence[Span]) -> list[Span]:
    """Operations in order, those that begin within another cut off at its end: what rounding made longer."""
    open_ends: list[int] = []
    cut = []
    for operation in operations:
        while open_ends and open_ends[-1] <= operation.start:
            open_ends.pop()
        end = min([operation.end, *open_ends[-1:]])
        open_ends.append(end)
        cut.append(operation._replace(end=end))
    return cut


def shallow(operations: Sequence[Sequence[Span]], most: int) -> list[list[Span]]:
    """Of the nested operations of some actions at most so many in all, without the innermost levels of nesting."""
    depths = [depths_of(inside) for inside in operations]
    counts = Counter(itertools.chain.from_iterable(depths))
    fitting = list(
        itertools.takewhile(lambda total: total <= most, itertools.accumulate(counts[d] for d in sorted(counts)))
    )
    return [
        [operation for operation, depth in zip(inside, levels, strict=True) if depth < len(fitting)]
        for inside, levels in zip(operations, depths, strict=True)
    ]


def depths_of(operations: Sequence[Span]) -> list[int]:
    """In how many others each of the nested operations is."""
    open_ends: list[int] = []
    depths = []
    for operation in operations:
        while open_ends and open_ends[-1] <= operation.start:
            open_ends.pop()
        depths.append(len(open_ends))
        open_ends.append(operation.end)
    return depths


def outermost(operations: Sequence[Span]) -> list[Span]:
    """Of nested operations in order, those that are in no other."""
    found: list[Span] = []
    for operation in operations:
        if not found or operation.start >= found[-1].end:
            found.append(operation)
    return found
