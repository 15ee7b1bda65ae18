"""A schedule lowered to lanes: the actions that each lane runs, and the values that pass between lanes.

A schedule lists computation. A worker has four lanes: it computes, sends, receives, and talks to its replicas, all at
once. 1F1B with two stages and two micro-batches, a value on its way for half a unit:

    1 receive  ~ ~
    1 compute   0aa1bbU        aa, bb: backwards
    1 send        ~  ~
    0 receive     ~  ~
    0 compute  01  .aa.bbU
    0 send      ~ ~

Compute and collective lanes run their actions in the order of the schedule. Sends and receives follow from the rules:
every value that an action makes for another worker is a message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stretto.schedule.action import Action
from stretto.schedule.dataflow import Edge, Rules
from stretto.schedule.schedule import Schedule

COLLECTIVES = "ARM"  # the kinds that a trace shows on the lane "collective"
OVERLAPPING = "AM"  # kinds that may run beside computation: they need replicas, but no other worker of the pipeline
LATE = 1 << 20  # a turn so late that all micro-batches that its actions refer to have entered


class Lane(NamedTuple):
    """Actions `first` to `last - 1` of a lowered schedule, which `worker` runs one after the other in every turn."""

    worker: int
    first: int
    last: int


class Passing(NamedTuple):
    """A value that one lane makes and another one waits for, in every turn.

    `source` and `user` are positions in `Lowered.actions`: the user of minibatch g waits for the value that the source
    makes for minibatch g + `back`. `user` is None for a message that no action waits for. `edge` has the source's own
    offset; it is None where the user only has to come after the source, in the order of their stage.
    """

    edge: Edge | None
    source: int
    user: int | None
    back: int
    receiver: int | None  # the worker a message goes to; None for what stays on its worker


@dataclass(frozen=True)
class Lowered:
    """One turn: all actions, lane after lane, and the values that pass between lanes, ordered by source."""

    schedule: Schedule
    actions: tuple[Action, ...]
    lanes: tuple[Lane, ...]  # the compute lanes of all workers, then those collective lanes that have actions
    passings: tuple[Passing, ...]

    @cached_property
    def late(self) -> tuple[int, ...]:
        """For each action, how many turns after a minibatch enters it runs for that minibatch."""
        return tuple(-(action.microbatch // self.schedule.per_turn) for action in self.actions)

    @cached_property
    def lane_of(self) -> tuple[int, ...]:
        return tuple(number for number, lane in enumerate(self.lanes) for _ in range(lane.first, lane.last))

    @cached_property
    def beside(self) -> frozenset[str]:
        """The kinds of actions that run beside computation."""
        lanes = self.lanes[self.schedule.num_workers :]
        return frozenset(action.kind for lane in lanes for action in self.actions[lane.first : lane.last])

    def action(self, position: int, minibatch: int) -> Action:
        kind, stage, offset = self.actions[position]
        per_turn = self.schedule.per_turn
        return Action(kind, stage, minibatch * per_turn + offset % per_turn)


def lower(schedule: Schedule, rules: Rules, *, overlap: bool = False) -> Lowered:
    """Lower a schedule. `overlap`: replicas agree (A, M) on a lane of their own, while workers compute."""
    beside = OVERLAPPING if overlap else ""
    actions: list[Action] = []
    lanes: list[Lane] = []
    for collective in (False, True):
        for worker, body in enumerate(schedule.body):
            lane_actions = [action for action in body if (action.kind in beside) == collective]
            if lane_actions or not collective:
                lanes.append(Lane(worker, len(actions), len(actions) + len(lane_actions)))
                actions += lane_actions
    lowered = Lowered(schedule, tuple(actions), tuple(lanes), ())
    users = users_of(lowered, rules)
    passings = [
        passing
        for source in range(len(actions))
        for edge, receiver in dict.fromkeys(values_made(lowered, rules, source))
        for passing in passings_of(lowered, edge, source, receiver, users.get((edge, source), []))
    ]
    passings += in_order_of_stage(lowered)
    passings.sort(key=lambda passing: passing.source)  # stable: a worker's messages leave in the order they are made
    return Lowered(schedule, lowered.actions, lowered.lanes, tuple(passings))


def users_of(lowered: Lowered, rules: Rules) -> dict[tuple[Edge, int], list[tuple[int, int]]]:
    """The users of each value: {(edge with its source's offset, source): [(user, minibatches back)]}."""
    per_turn = lowered.schedule.per_turn
    index = {(kind, stage, offset % per_turn): i for i, (kind, stage, offset) in enumerate(lowered.actions)}
    users: dict[tuple[Edge, int], list[tuple[int, int]]] = {}
    for user, (kind, stage, offset) in enumerate(lowered.actions):
        for value, (source_kind, source_stage, microbatch), home in rules.needs(
            Action(kind, stage, LATE * per_turn + offset % per_turn)
        ):
            source = index.get((source_kind, source_stage, microbatch % per_turn))
            if source is not None:  # None: the loader, which never keeps anyone waiting
                edge = Edge(value, lowered.actions[source], home)
                users.setdefault((edge, source), []).append((user, microbatch // per_turn - LATE))
    return users


def values_made(lowered: Lowered, rules: Rules, source: int) -> Iterator[tuple[Edge, int | None]]:
    """The values that an action makes for stages, each with the other worker that gets it; None for its own."""
    action = lowered.actions[source]
    homes = lowered.schedule.worker_of
    for value, _, stage in rules.makes(action._replace(microbatch=action.microbatch % lowered.schedule.per_turn)):
        if stage in homes:
            yield Edge(value, action, stage), None if homes[stage] == homes[action.stage] else homes[stage]


def passings_of(
    lowered: Lowered, edge: Edge, source: int, receiver: int | None, users: list[tuple[int, int]]
) -> Iterator[Passing]:
    """The passings of a value: one to each lane that waits for it, to the lane's first action that does."""
    first: dict[int, tuple[int, int, int]] = {}
    for user, back in users:
        later = lowered.late[user] - back - lowered.late[source]  # turns from the source's to the user's
        lane = lowered.lane_of[user]
        if lane != lowered.lane_of[source] or (later, user) <= (0, source):  # otherwise its own lane makes it before
            first[lane] = min(first.get(lane, (later, user, back)), (later, user, back))
    for _, user, back in first.values():
        yield Passing(edge, source, user, back, receiver)
    if receiver is not None and not first:
        yield Passing(edge, source, None, 0, receiver)


def in_order_of_stage(lowered: Lowered) -> Iterator[Passing]:
    """Keeps each merge (M) that runs beside computation in its place among its stage's actions."""
    place = {action: position for position, action in enumerate(lowered.actions)}
    for merge, action in enumerate(lowered.actions):
        if action.kind == "M" and lowered.lane_of[merge] >= lowered.schedule.num_workers:
            order = [place[other] for other in lowered.schedule.of_stage(action.stage)]
            start = order.index(merge)
            yield after(lowered, order[start - 1], merge, turns=int(start == 0))
            for steps in range(1, len(order)):
                follower = order[(start + steps) % len(order)]
                if lowered.actions[follower].kind == "M":
                    break
                yield after(lowered, merge, follower, turns=(start + steps) // len(order))


def after(lowered: Lowered, source: int, user: int, turns: int) -> Passing:
    """`user` comes after what `source` did so many turns earlier."""
    return Passing(None, source, user, lowered.late[user] - turns - lowered.late[source], None)
