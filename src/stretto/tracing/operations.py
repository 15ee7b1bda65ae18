"""The operations inside an action: spans of the lane "operation", each within the action that ran it."""

from bisect import bisect_right
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


def outermost(operations: Sequence[Span]) -> list[Span]:
    """Of nested operations in order, those that are in no other."""
    found: list[Span] = []
    for operation in operations:
        if not found or operation.start >= found[-1].end:
            found.append(operation)
    return found
