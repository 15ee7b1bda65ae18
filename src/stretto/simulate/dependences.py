"""What every action waits for, and from how many turns before: the dependences of a lowered schedule.

The exact steady state (`steady.py`) follows their cycles; the periodic part (`periodic.py`) asks how far they reach.
"""

import itertools
from typing import NamedTuple

from stretto.schedule.lower import Lowered


class Dependence(NamedTuple):
    """`after` cannot start before `before`, `turns` turns earlier, has ended: positions in `Lowered.actions`.

    `travels` says that the value which `after` waits for comes from another worker.
    """

    before: int
    after: int
    turns: int
    travels: bool = False


def dependences(lowered: Lowered) -> list[Dependence]:
    """What must come before what: each lane's own order, and the values that pass between lanes.

    What a lane's own order implies already is left out.
    """
    edges: list[Dependence] = []
    for lane in lowered.lanes:
        if lane.first < lane.last:
            edges += [Dependence(*pair, turns=0) for pair in itertools.pairwise(range(lane.first, lane.last))]
            edges.append(Dependence(lane.last - 1, lane.first, turns=1))
    for value, passing in enumerate(lowered.passings):
        if passing.user is not None:
            travels = passing.receiver is not None
            edges.append(Dependence(passing.source, passing.user, turns_apart(lowered, value), travels))
    return edges


def turns_apart(lowered: Lowered, value: int) -> int:
    """The turns from the action that makes a value to the action that waits for it; 0 where nobody waits."""
    passing = lowered.passings[value]
    if passing.user is None:
        return 0
    return lowered.late[passing.user] - passing.back - lowered.late[passing.source]


def farthest(lowered: Lowered) -> int:
    """The most turns that any value spans, at least 1: a turn follows from so many turns before it."""
    return max([1, *(abs(turns_apart(lowered, value)) for value in range(len(lowered.passings)))])
