"""How long one turn takes once a pipeline is full: exactly, from the cycles of its dependences."""

import itertools
from typing import NamedTuple

from stretto.errors import ScheduleError
from stretto.schedule import Action, Rules, Schedule
from stretto.simulate.simulate import Durations


class Dependence(NamedTuple):
    """`after` cannot start before `before`, `turns` turns earlier, has ended: positions in a list of actions."""

    before: int
    after: int
    turns: int


def period(schedule: Schedule, rules: Rules, durations: Durations) -> float:
    """The time of one turn in the steady state of the slowest worker, in the unit of `durations`.

    Every cycle of dependences that spans k turns and takes time t forces k turns to take at least t; the slowest
    cycle is reached (max-plus algebra; Baccelli et al. 1992, chapter 2). Exact for whole numbers as durations.
    Raises ScheduleError for a cycle within one turn, which nothing could ever start.
    """
    actions = [action for body in schedule.body for action in body]
    edges = dependences(schedule, rules, actions)
    cost = [durations(action) for action in actions]
    best: float = 0
    while (cycle := slower_cycle(len(actions), edges, cost, best)) is not None:
        turns = sum(edge.turns for edge in cycle)
        if turns <= 0:
            names = " after ".join(str(actions[edge.after]) for edge in cycle)
            raise ScheduleError(f"deadlock: {names} after {actions[cycle[0].after]}, all within one turn")
        best = sum(cost[edge.after] for edge in cycle) / turns
    return best


def dependences(schedule: Schedule, rules: Rules, actions: list[Action]) -> list[Dependence]:
    """What must come before what, and how many turns earlier: each worker's own order, and what actions need."""
    index = {action: position for position, action in enumerate(actions)}
    by_kind: dict[tuple[str, int, int], Action] = {
        (a.kind, a.stage, a.microbatch % schedule.per_turn): a for a in actions
    }
    edges = []
    for body in schedule.body:
        edges += [Dependence(index[a], index[b], 0) for a, b in itertools.pairwise(body)]
        edges.append(Dependence(index[body[-1]], index[body[0]], 1))
    for action in actions:
        for need in rules.needs(action):
            kind, stage, microbatch = need.source
            source = by_kind.get((kind, stage, microbatch % schedule.per_turn))
            if source is not None:  # None: the loader, which never keeps anyone waiting
                turns = (source.microbatch - microbatch) // schedule.per_turn
                edges.append(Dependence(index[source], index[action], turns))
    return edges


def slower_cycle(size: int, edges: list[Dependence], cost: list[float], pace: float) -> list[Dependence] | None:
    """A cycle that takes longer than `pace` a turn, if there is one (Bellman and Ford on longest paths)."""
    length = [0.0] * size
    last: list[Dependence | None] = [None] * size
    changed = -1
    for _ in range(size + 1):
        changed = -1
        for edge in edges:
            reached = length[edge.before] + cost[edge.after] - pace * edge.turns
            if reached > length[edge.after] + 1e-12 * max(1.0, abs(reached)):
                length[edge.after], last[edge.after], changed = reached, edge, edge.after
        if changed < 0:
            return None
    node = changed
    for _ in range(size):  # walk back far enough to be on the cycle
        edge_in = last[node]
        assert edge_in is not None
        node = edge_in.before
    cycle: list[Dependence] = []
    at = node
    while not cycle or at != node:
        edge_in = last[at]
        assert edge_in is not None
        cycle.append(edge_in)
        at = edge_in.before
    return cycle
