"""Checks that a schedule is complete and cannot deadlock, with buffered sends and with rendezvous sends.

First comes a proof from a single turn, which holds however many turns are run. A schedule that it does not prove is
run for several turns, more of them the longer its pipeline drains: for a pipeline that never drains this takes the
square of the number of stages.

With P = per_turn, the action a with offset o runs for micro-batch nP + o in turn n, if it is one of the NP that enter.
What a needs is made by b, k turns earlier. Four claims make the proof, for every N:

1. *Complete.* An action runs once for every micro-batch with its offset's residue modulo P. So it is enough that the
   body has every kind of every stage once for each residue, and A, R, U and M once for each that ends an update.
2. *No deadlock with buffered sends.* What runs is a graph: in the order of its worker, and after what it needs. A
   micro-batch that does not enter leaves out actions, and a worker's order passes over them: if the graph of endlessly
   many turns, forward and backward, has no cycle, then a run's has none. Where no k is negative every edge leads to
   the same turn or to a later one, so a cycle would stay in one turn. All turns are alike: the workers' orders in one
   turn, and the edges with k = 0, must have no cycle.
3. *Nothing is missing.* A value and its user have micro-batches of the same turn, so that both enter or neither does;
   or it is a tied weight, which is needed only once an update has made it. Its users are on one worker, and all but
   the last of them keep it.
4. *No deadlock with rendezvous sends.* A channel leads from one worker to one other. If its values are first needed in
   the order in which they are made, then the one at its head is always the one needed next, and is there once it is
   made, as with buffered sends. What leaves some out keeps the order of the others, so neighbors of one turn are
   compared, and its last with the first of the next. Only a tied weight may be made for a user that never enters:
   the micro-batches of the users ascend, too, so that none is needed after it.

Where a claim does not hold the schedule may still be sound: then nothing is known.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from math import lcm
from typing import NamedTuple

from stretto.errors import ScheduleError
from stretto.options.checks import is_among, of_kind, shown, whole
from stretto.schedule.action import Action
from stretto.schedule.dataflow import Edge, Rules
from stretto.schedule.schedule import MOST_TURNS, Schedule

TIED = "tied-weight"
Value = tuple[str, str, int, int, int]  # an edge whose source has its micro-batch modulo the period


class Turn(NamedTuple):
    """One turn, worker after worker, so late that all micro-batches that its actions refer to have entered.

    It has `period` micro-batches: several of the schedule's turns, where needs repeat only after as many.
    """

    schedule: Schedule
    period: int
    first: int  # micro-batch
    actions: tuple[Action, ...]
    workers: tuple[int, ...]  # of each action

    @classmethod
    def of(cls, schedule: Schedule, rules: Rules, period: int) -> "Turn":
        per_turn = schedule.per_turn
        behind = max((max(tie.behind) for tie in rules.ties), default=0)
        first = (schedule.drain + max(0, behind) + 2) * period
        actions = [
            (Action(kind, stage, first + turn * per_turn + offset), worker)
            for worker, body in enumerate(schedule.body)
            for turn in range(period // per_turn)
            for kind, stage, offset in body
        ]
        return cls(schedule, period, first, *map(tuple, zip(*actions, strict=True)))

    def value(self, edge: Edge) -> Value:
        """The edge with its micro-batch modulo the period: the same in all turns."""
        value, (kind, stage, microbatch), user = edge
        return value, kind, stage, microbatch % self.period, user

    def entered(self, edge: Edge, microbatch: int) -> bool:
        """Whether the source's micro-batch enters wherever that of the edge's user does."""
        source, per_turn = edge.source.microbatch, self.schedule.per_turn
        return source // per_turn == microbatch // per_turn or (edge.value == TIED and source < microbatch)


class Use(NamedTuple):
    """The action at `position` needs a value `turns` turns after it was made.

    `microbatch` is the action's, if the value is made in this turn. `frees`: whether the action frees the value.
    """

    turns: int
    position: int
    microbatch: int
    frees: bool


def proved(schedule: Schedule, rules: Rules, most: int) -> bool:
    """Whether one turn proves that a schedule is complete and free of deadlock; False proves nothing.

    False, too, where needs repeat only after more than `most` turns.
    """
    period = lcm(schedule.per_turn, *(repeat for tie in rules.ties for repeat in (len(tie.behind), tie.every)))
    if period > most * schedule.per_turn or not has_every_action(schedule, rules):
        return False
    turn = Turn.of(schedule, rules, period)
    makers = makers_of(turn, rules)
    uses = uses_of(turn, rules, makers)
    if uses is None or not acyclic(turn, makers, uses):
        return False
    carried = channels(turn, makers, uses)
    return all(in_order(name, channel, turn.period) for (name, _, _), channel in carried.items())


def has_every_action(schedule: Schedule, rules: Rules) -> bool:
    """Claim 1: whether the body has each action of each stage once for each micro-batch of a turn."""
    per_turn, per_update = schedule.per_turn, rules.per_update
    if schedule.num_stages != rules.num_stages or per_update < 1 or per_turn % per_update:
        return False
    if not all(rules.sweeps_are_possible(stage) for stage in range(schedule.num_stages)):
        return False
    required = Counter(
        (kind, stage, residue)
        for stage in range(schedule.num_stages)
        for residue in range(per_turn)
        for kind in rules.kinds(stage, residue)
    )
    return required == Counter(
        (kind, stage, offset % per_turn) for actions in schedule.body for kind, stage, offset in actions
    )


def makers_of(turn: Turn, rules: Rules) -> dict[Value, int | None]:
    """The position of the action that makes each value, in the order in which they are made; None: it is loaded."""
    makers: dict[Value, int | None] = {}
    for microbatch in range(turn.first, turn.first + turn.period):
        makers.update((turn.value(edge), None) for edge in rules.loads(microbatch))
    for position, action in enumerate(turn.actions):
        makers.update((turn.value(edge), position) for edge in rules.makes(action))
    return makers


def uses_of(turn: Turn, rules: Rules, makers: Mapping[Value, int | None]) -> dict[Value, list[Use]] | None:
    """The users of each value in the order in which they come; None if claim 3 fails, or a k is negative."""
    uses: dict[Value, list[Use]] = {}
    for position, action in enumerate(turn.actions):
        needs = rules.needs(action)
        freed = frozenset(rules.frees(action, needs))
        for edge in needs:
            value, source = turn.value(edge), edge.source.microbatch
            if value not in makers or edge.stage != action.stage or not turn.entered(edge, action.microbatch):
                return None
            maker = makers[value]
            made = turn.first + source % turn.period if maker is None else turn.actions[maker].microbatch
            turns, moved = (made - source) // turn.period, made - source
            if turns < 0:
                return None
            uses.setdefault(value, []).append(Use(turns, position, action.microbatch + moved, edge in freed))
    for users in uses.values():
        users.sort()
    return uses if all(kept(value, users) for value, users in uses.items()) else None


def kept(value: Value, users: Sequence[Use]) -> bool:
    """Whether a value stays until its last user. A tied weight must have one user only: some may never enter."""
    return len(users) == 1 or (value[0] != TIED and not any(use.frees for use in users[:-1]))


def acyclic(turn: Turn, makers: Mapping[Value, int | None], uses: Mapping[Value, Sequence[Use]]) -> bool:
    """Claim 2: whether the orders of workers and the needs within one turn have no cycle."""
    last = len(turn.actions) - 1
    followers = [
        [position + 1] if position < last and worker == turn.workers[position + 1] else []
        for position, worker in enumerate(turn.workers)
    ]
    for value, users in uses.items():
        maker = makers[value]
        if maker is not None:
            followers[maker] += [use.position for use in users if use.turns == 0]
    waits_for = Counter(chain.from_iterable(followers))
    ready = [position for position in range(last + 1) if position not in waits_for]
    for position in ready:  # which grows; with graphlib making a Trainer of 512 stages takes 0.59 s, not 0.45
        for follower in followers[position]:
            waits_for[follower] -= 1
            if not waits_for[follower]:
                ready.append(follower)
    return len(ready) > last


def channels(
    turn: Turn, makers: Mapping[Value, int | None], uses: Mapping[Value, Sequence[Use]]
) -> dict[tuple[str, int, int], list[Use | None]]:
    """The values that each channel between two workers carries in a turn, as made: their first uses, None for unused.

    A channel is what `validity.channel_of` says: a value's name, its source's stage and its user's.
    """
    worker_of = turn.schedule.worker_of
    carried: dict[tuple[str, int, int], list[Use | None]] = {}
    for value, maker in makers.items():
        name, _, stage, _, user = value
        if maker is not None and worker_of.get(user, turn.workers[maker]) != turn.workers[maker]:
            carried.setdefault((name, stage, user), []).append(uses[value][0] if value in uses else None)
    return carried


def in_order(name: str, channel: Sequence[Use | None], period: int) -> bool:
    """Claim 4: whether the values of a channel are first needed in the order in which they are made."""
    uses = [use for use in channel if use is not None]
    if not uses:
        return True  # no action waits
    first = uses[0]
    uses.append(first._replace(turns=first.turns + 1, microbatch=first.microbatch + period))  # in the next turn
    return len(uses) > len(channel) and all(
        former[:2] <= later[:2] and (name != TIED or former.microbatch <= later.microbatch)
        for former, later in pairwise(uses)
    )


SENDS = ("buffered", "rendezvous")


def check(schedule: Schedule, rules: Rules, turns: int | None = None) -> None:
    """Raise ScheduleError, naming the first offending action, unless `schedule` is complete and free of deadlock.

    Complete: every stage runs every micro-batch forward once, again where the rules recompute it, backward once (B, or
    I and W where they split it), and every update once. Free of deadlock: it runs to its end under both kinds of sends.
    With `turns` the schedule is run for so many turns, without tensors. Without, it is checked for any number of turns:
    one turn proves it (`proof`), or a run with fill, steady state and drain shows it.

    *buffered*: a value is there once it is made. *rendezvous*: the values of one kind from one stage to another travel
    through one channel in the order they are made, and one leaves the channel only when the receiver reaches an action
    that needs it; the sender computes on meanwhile. (Point-to-point messages with a tag for each channel behave so.
    A single channel for each pair of workers would be too strict: zb-v's workers exchange activations and gradients
    both ways, and taking them in the order they are made would cost half as much memory again.)
    """
    of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
    of_kind("rules", rules, Rules, "stretto.schedule.Rules.of(schedule, reach)")
    if turns is not None:
        whole("turns", turns, 0, MOST_TURNS)
        run(schedule, rules, turns)
        return
    enough = 2 * schedule.drain + 3 + rules.lookback  # fill, steady state and drain
    if enough > MOST_TURNS or not proved(schedule, rules, enough):
        run(schedule, rules, enough)


def run(schedule: Schedule, rules: Rules, turns: int) -> None:
    """Raise ScheduleError unless so many turns, one after the other, are complete and end under both kinds of sends."""
    complete(schedule, rules, turns)
    try:
        run_dry(schedule, rules, turns, "rendezvous")  # what ends here also ends with buffers, where values come sooner
    except ScheduleError:
        run_dry(schedule, rules, turns, "buffered")
        raise


def complete(schedule: Schedule, rules: Rules, turns: int) -> None:
    """Raise ScheduleError unless every action of every micro-batch is in the schedule once."""
    if schedule.num_stages != rules.num_stages:
        raise ScheduleError(f"the schedule drives {schedule.num_stages} stages, the rules know {rules.num_stages}")
    for stage in range(schedule.num_stages):
        if not rules.sweeps_are_possible(stage):
            raise ScheduleError(
                f"{Action('B', stage, 0)} cannot be one sweep: stage {stage} sends down less than it uses itself; "
                "split its backward into I and W"
            )
    found = Counter(action for worker in range(schedule.num_workers) for action in schedule.unroll(worker, turns))
    for microbatch in range(turns * schedule.per_turn):
        for stage in range(schedule.num_stages):
            for kind in rules.kinds(stage, microbatch):
                action = Action(kind, stage, microbatch)
                times = found.pop(action, 0)
                if times != 1:
                    how = "is missing from" if times == 0 else f"stands {times} times on"
                    raise ScheduleError(f"{action} {how} worker {schedule.worker_of[stage]}")
    for action in found:
        raise ScheduleError(f"{action} has no place in this schedule (worker {schedule.worker_of[action.stage]})")


def run_dry(schedule: Schedule, rules: Rules, turns: int, sends: str) -> None:
    """Run a schedule without tensors. Raise ScheduleError at a deadlock, naming what each worker waits for."""
    if not is_among(sends, SENDS):
        raise ScheduleError(f"sends={shown(sends)}: choose from {', '.join(SENDS)}")
    queues = [
        deque((action, rules.needs(action)) for action in schedule.unroll(worker, turns))
        for worker in range(schedule.num_workers)
    ]
    there = {edge for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
    channels: dict[tuple[str, int, int], deque[Edge]] = {}

    def receive(needs: Sequence[Edge]) -> None:
        for edge in needs:
            channel = channels.get(channel_of(edge))
            while channel and channel[0] in needs:
                there.add(channel.popleft())

    progress = True
    while progress:
        progress = False
        for worker, queue in enumerate(queues):
            while queue:
                action, needs = queue[0]
                receive(needs)
                if not there.issuperset(needs):
                    break
                queue.popleft()
                there.difference_update(rules.frees(action, needs))
                progress = True
                for edge in rules.makes(action):
                    peer = schedule.worker_of.get(edge.stage, worker)
                    if peer == worker or sends == "buffered":
                        there.add(edge)
                    else:
                        channels.setdefault(channel_of(edge), deque()).append(edge)
    if any(queues):
        left = [deque(action for action, _ in queue) for queue in queues]
        raise ScheduleError(f"deadlock with {sends} sends: {explain(left, rules, there)}")


def channel_of(edge: Edge) -> tuple[str, int, int]:
    """The channel a value travels through: its name, the stage that makes it, the stage that uses it."""
    return edge.value, edge.source.stage, edge.stage


def explain(queues: Iterable[deque[Action]], rules: Rules, there: set[Edge]) -> str:
    """What each blocked worker waits for: "worker 1 waits for 0F3's activation before 1F3"; `there` has been made."""
    clauses = []
    for worker, queue in enumerate(queues):
        if queue:
            missing = next(edge for edge in rules.needs(queue[0]) if edge not in there)
            clauses.append(f"worker {worker} waits for {missing.source}'s {missing.value} before {queue[0]}")
    return "; ".join(clauses)
