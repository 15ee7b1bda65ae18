"""The pace of a schedule's steady state, exactly, from the cycles of the dependences between its actions."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from stretto.errors import ScheduleError
from stretto.schedule.action import Action
from stretto.schedule.dataflow import Rules
from stretto.schedule.lower import Lowered, lower
from stretto.schedule.schedule import Schedule

Durations = Callable[[Action], float]


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


def period(schedule: Schedule, rules: Rules, durations: Durations, *, latency: float = 0) -> float:
    """The time of one turn in the steady state of the slowest worker, in the unit of `durations`.

    `latency` is the time that a value needs from one worker to another.

    A cycle of dependences that spans k turns and takes time t forces k turns to take at least t, and the steady state
    is as slow as the slowest cycle (max-plus algebra; Baccelli et al. 1992, chapter 2). The result is exact.
    Raises ScheduleError for a cycle within one turn: none of its actions could ever start.
    """
    lowered = lower(schedule, rules)
    actions, edges = lowered.actions, dependences(lowered)
    times = [Fraction(durations(action)) for action in actions]
    travel = Fraction(latency)
    unit = math.lcm(travel.denominator, *(time.denominator for time in times))
    whole, whole_travel = [int(time * unit) for time in times], int(travel * unit)  # paces are compared exactly
    cost = {edge: whole[edge.after] + whole_travel * edge.travels for edge in edges}
    pace = Fraction(0)
    while (cycle := slower_cycle(len(actions), edges, cost, pace)) is not None:
        turns = sum(edge.turns for edge in cycle)
        if turns <= 0:
            names = " after ".join(str(actions[edge.after]) for edge in cycle)
            raise ScheduleError(f"deadlock: {names} after {actions[cycle[0].after]}, all within one turn")
        pace = Fraction(sum(cost[edge] for edge in cycle), turns)
    return float(pace / unit)


def slower_cycle(
    size: int, edges: list[Dependence], cost: dict[Dependence, int], pace: Fraction
) -> list[Dependence] | None:
    """A cycle that takes longer than `pace` a turn, if there is one (Bellman and Ford on longest paths).

    Dependences within a turn have no cycle: taken in order, they carry a length through a whole turn in one pass. A
    cycle among the edges that last lengthened each node takes longer than `pace`, and is found as soon as it closes.
    """
    ordered = in_order(size, edges)
    length = [0] * size
    gains = [pace.denominator * cost[edge] - pace.numerator * edge.turns for edge in ordered]
    last: list[Dependence | None] = [None] * size
    for _ in range(size + 1):
        changed = False
        for edge, gain in zip(ordered, gains, strict=True):
            longer = length[edge.before] + gain
            if longer > length[edge.after]:
                length[edge.after], last[edge.after], changed = longer, edge, True
        if not changed:
            return None
        cycle = closed(last)
        if cycle:
            return cycle
    raise AssertionError("longest paths neither settle nor close a cycle")


def in_order(size: int, edges: list[Dependence]) -> list[Dependence]:
    """The edges within a turn in topological order, then the edges between turns.

    Where edges within a turn form a cycle (a deadlock), the edges on it and behind it come last.
    """
    within: list[list[Dependence]] = [[] for _ in range(size)]
    open_edges = [0] * size
    for edge in edges:
        if edge.turns == 0:
            within[edge.before].append(edge)
            open_edges[edge.after] += 1
    ready = [node for node in range(size) if not open_edges[node]]
    ordered: list[Dependence] = []
    while ready:
        for edge in within[ready.pop()]:
            ordered.append(edge)
            open_edges[edge.after] -= 1
            if not open_edges[edge.after]:
                ready.append(edge.after)
    taken = set(ordered)
    return ordered + [edge for edge in edges if edge not in taken]


def closed(last: list[Dependence | None]) -> list[Dependence]:
    """A cycle among the edges `last`, at most one into each node; empty if there is none."""
    seen = [-1] * len(last)
    for start in range(len(last)):
        node: int | None = start
        while node is not None and seen[node] < 0:
            seen[node] = start
            edge = last[node]
            node = None if edge is None else edge.before
        if node is not None and seen[node] == start:
            cycle: list[Dependence] = []
            at = node
            while not cycle or at != node:
                edge = last[at]
                assert edge is not None
                cycle.append(edge)
                at = edge.before
            return cycle
    return []
