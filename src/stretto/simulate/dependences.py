"""The dependences of a lowered schedule: which actions each action waits for, and how many turns earlier these ran.

The exact steady state (`steady.py`) follows their cycles; the search for a periodic part (`periodic.py`) needs their
longest reach.
"""

import itertools
from typing import NamedTuple

from stretto.schedule.lower import Lowered


class Dependence(NamedTuple):
    """`after` cannot start before `before`, `turns` turns earlier, has ended: positions in `Lowered.actions`.

    `travels`: the value that `after` waits for comes from another worker.
    """

    before: int
    after: int
    turns: int
    travels: bool = False


def dependences(lowered: Lowered) -> list[Dependence]:
    """The dependences of each lane's own order, and of the values that pass between lanes.

    Values within a lane are left out: the lane's order implies them.
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
    """The turns from the action that makes a value to the action that waits for it; 0 where no action waits."""
    passing = lowered.passings[value]
    if passing.user is None:
        return 0
    return lowered.late[passing.user] - passing.back - lowered.late[passing.source]


def farthest(lowered: Lowered) -> int:
    """The most turns that any value spans, at least 1: a turn's times follow from those of as many turns before."""
    return max([1, *(abs(turns_apart(lowered, value)) for value in range(len(lowered.passings)))])
