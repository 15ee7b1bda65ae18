"""A schedule lowered to lanes: who is kept busy by what, and which values pass between lanes.

A schedule lists computation. A worker has four lanes: it computes, sends, receives, and talks to its replicas, all at
once. 1F1B with two stages and two micro-batches, a value on its way for half a unit:

    1 receive  ~ ~
    1 compute   0aa1bbU        aa, bb: backwards
    1 send        ~  ~
    0 receive     ~  ~
    0 compute  01  .aa.bbU
    0 send      ~ ~

What stands on compute and collective lanes is in the order of the schedule; what is sent and received follows from the
rules: every value that an action makes for another worker is a message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stretto.schedule.action import Action
from stretto.schedule.rules import Edge, Rules
from stretto.schedule.schedule import Schedule

COLLECTIVES = "ARM"  # the kinds that a trace shows on the lane "collective"
OVERLAPPING = "AM"  # those that a worker may compute beside: replicas agree, and it needs nobody else of its pipeline
LATE = 1 << 20  # turns after which no micro-batch that an action refers to lies before the first


class Lane(NamedTuple):
    """Actions `first` to `last - 1` of a lowered schedule, which `worker` runs one after the other in every turn."""

    worker: int
    first: int
    last: int


class Passing(NamedTuple):
    """A value that one lane makes and another one waits for, in every turn: positions in `Lowered.actions`.

    The `user` of minibatch g waits for what the `source` of minibatch g + `back` makes. It is None where nobody waits:
    nobody needs the message, or nobody before another lane's action has waited for it. `edge` is that of the source's
    own offset; None where the user only keeps its place in the order of its stage.
    """

    edge: Edge | None
    source: int
    user: int | None
    back: int
    receiver: int | None  # the worker a message goes to; None for what stays on its worker


@dataclass(frozen=True)
class Lowered:
    """One turn: all actions, lane after lane, and what passes between lanes, ordered by its source."""

    schedule: Schedule
    actions: tuple[Action, ...]
    lanes: tuple[Lane, ...]  # the compute lanes of all workers, then those collective lanes that have actions
    passings: tuple[Passing, ...]

    @cached_property
    def late(self) -> tuple[int, ...]:
        """How many turns after a minibatch entered each action is run for it."""
        return tuple(-(action.microbatch // self.schedule.per_turn) for action in self.actions)

    @cached_property
    def lane_of(self) -> tuple[int, ...]:
        """The lane of each action."""
        return tuple(number for number, lane in enumerate(self.lanes) for _ in range(lane.first, lane.last))

    @cached_property
    def beside(self) -> frozenset[str]:
        """The kinds that a worker computes beside."""
        lanes = self.lanes[self.schedule.num_workers :]
        return frozenset(action.kind for lane in lanes for action in self.actions[lane.first : lane.last])

    def action(self, position: int, minibatch: int) -> Action:
        """An action with the micro-batch that it has for a minibatch."""
        kind, stage, offset = self.actions[position]
        per_turn = self.schedule.per_turn
        return Action(kind, stage, minibatch * per_turn + offset % per_turn)


def lower(schedule: Schedule, rules: Rules, *, overlap: bool = False) -> Lowered:
    """Lower a schedule. `overlap` says that workers compute while their replicas agree (A, M), on a lane of its own."""
    beside = OVERLAPPING if overlap else ""
    actions: list[Action] = []
    lanes: list[Lane] = []
    for collective in (False, True):
        for worker, body in enumerate(schedule.body):
            own = [action for action in body if (action.kind in beside) == collective]
            if own or not collective:
                lanes.append(Lane(worker, len(actions), len(actions) + len(own)))
                actions += own
    lowered = Lowered(schedule, tuple(actions), tuple(lanes), ())
    waits = waiting(lowered, rules)
    passings = [
        passing
        for source in range(len(actions))
        for edge, receiver in dict.fromkeys(made(lowered, rules, source))
        for passing in passed(lowered, edge, source, receiver, waits.get((edge, source), []))
    ]
    passings += in_order_of_stage(lowered)
    passings.sort(key=lambda passing: passing.source)  # stable: a worker's messages leave in the order they are made
    return Lowered(schedule, lowered.actions, lowered.lanes, tuple(passings))


def waiting(lowered: Lowered, rules: Rules) -> dict[tuple[Edge, int], list[tuple[int, int]]]:
    """Who waits for each value: {(edge of its source's offset, source): [(user, minibatches back)]}."""
    per_turn = lowered.schedule.per_turn
    index = {(kind, stage, offset % per_turn): i for i, (kind, stage, offset) in enumerate(lowered.actions)}
    waits: dict[tuple[Edge, int], list[tuple[int, int]]] = {}
    for user, (kind, stage, offset) in enumerate(lowered.actions):
        for value, (of_kind, of_stage, microbatch), home in rules.needs(
            Action(kind, stage, LATE * per_turn + offset % per_turn)
        ):
            source = index.get((of_kind, of_stage, microbatch % per_turn))
            if source is not None:  # None: the loader, which never keeps anyone waiting
                edge = Edge(value, lowered.actions[source], home)
                waits.setdefault((edge, source), []).append((user, microbatch // per_turn - LATE))
    return waits


def made(lowered: Lowered, rules: Rules, source: int) -> Iterator[tuple[Edge, int | None]]:
    """What an action makes, and the other worker that it is for; not what is for the caller."""
    action = lowered.actions[source]
    homes = lowered.schedule.worker_of
    for value, _, stage in rules.makes(action._replace(microbatch=action.microbatch % lowered.schedule.per_turn)):
        if stage in homes:
            yield Edge(value, action, stage), None if homes[stage] == homes[action.stage] else homes[stage]


def passed(
    lowered: Lowered, edge: Edge, source: int, receiver: int | None, waits: list[tuple[int, int]]
) -> Iterator[Passing]:
    """A value as each lane waits for it, by the first of the lane's actions that does."""
    first: dict[int, tuple[int, int, int]] = {}
    for user, back in waits:
        later = lowered.late[user] - back - lowered.late[source]  # turns from the source's to the user's
        lane = lowered.lane_of[user]
        if lane != lowered.lane_of[source] or (later, user) <= (0, source):  # else its own order has it come before
            first[lane] = min(first.get(lane, (later, user, back)), (later, user, back))
    for _, user, back in first.values():
        yield Passing(edge, source, user, back, receiver)
    if receiver is not None and not first:
        yield Passing(edge, source, None, 0, receiver)


def in_order_of_stage(lowered: Lowered) -> Iterator[Passing]:
    """Where replicas merge weights beside the computation (M), their stage's actions still come before and after."""
    place = {action: position for position, action in enumerate(lowered.actions)}
    for merge, action in enumerate(lowered.actions):
        if action.kind == "M" and lowered.lane_of[merge] >= lowered.schedule.num_workers:
            order = [place[each] for each in lowered.schedule.of_stage(action.stage)]
            own = order.index(merge)
            yield after(lowered, order[own - 1], merge, turns=int(own == 0))
            for steps in range(1, len(order)):
                follower = order[(own + steps) % len(order)]
                if lowered.actions[follower].kind == "M":
                    break
                yield after(lowered, merge, follower, turns=(own + steps) // len(order))


def after(lowered: Lowered, source: int, user: int, turns: int) -> Passing:
    """`user` comes after what `source` did so many turns earlier."""
    return Passing(None, source, user, lowered.late[user] - turns - lowered.late[source], None)
