"""Many turns through their periodic part: a few are simulated, what repeats is counted.

A simulation is a machine whose next step follows from its state. Once it is in a state in which it was some turns ago,
all times moved on by the same amount, it does again what it did since then, until no more minibatches enter. So
simulating fewer minibatches gives the same beginning and the same end, and the middle is multiplication.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stretto.schedule import Rules, Schedule
from stretto.schedule.lower import COLLECTIVES, Lowered, lower
from stretto.simulate.dependences import farthest
from stretto.simulate.engine import Floats, SimulatedTimes, Whole, rounded, transfers
from stretto.simulate.network import Transport
from stretto.simulate.simulator import Durations, run_to_end, table_of, unit_costs
from stretto.simulate.timeline import Timeline, sum_in_order

LIKELY = 60  # turns after which a pattern repeats divide this more often than not
WORTHWHILE = 0.6  # of all turns; to simulate more in search of a pattern gains too little
QUEUEING = 0.3  # the same where messages queue: patterns begin late there, and a turn takes several times as long


class Repeat(NamedTuple):
    """From turn `first` on everything repeats after `turns` turns, `time` later; `times` more often than simulated."""

    first: int
    turns: int
    time: float
    times: int


@dataclass(frozen=True, eq=False)
class PeriodicTimeline:
    """Many turns: the `timeline` of those that were simulated, and what of them repeats (None: all were simulated)."""

    timeline: Timeline
    repeat: Repeat | None

    @property
    def turn(self) -> float | None:
        """The time of a turn in the periodic part; None where none was found."""
        return None if self.repeat is None else self.repeat.time / self.repeat.turns

    @property
    def makespan(self) -> float:
        """From the start to the end of the last action."""
        if self.repeat is None:
            return self.timeline.makespan
        lowered, outcome = self.timeline.lowered, self.timeline.outcome
        moved = turn_numbers(lowered.late, outcome.turns) >= self.repeat.first
        early = float(outcome.ends[~moved].max(initial=0))
        return max(early, float(outcome.ends[moved].max()) + self.repeat.times * self.repeat.time)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each worker computes."""
        if self.repeat is None:
            return self.timeline.busy
        again = [0.0] * self.timeline.schedule.num_workers
        for lane in self.timeline.lowered.lanes:
            for position in range(lane.first, lane.last):
                if self.timeline.lowered.actions[position].kind not in COLLECTIVES:
                    again[lane.worker] += float(self.timeline.outcome.durations[position, 0])
        turns = self.repeat.turns * self.repeat.times
        return tuple(once + turns * more for once, more in zip(self.timeline.busy, again, strict=True))

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the time in which each worker computes."""
        return tuple(busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """Time each worker waits for communication: see `Timeline.exposed`."""
        if self.repeat is None:
            return self.timeline.exposed
        first, turns, _, times = self.repeat
        late = np.array(self.timeline.lowered.late, np.int64)
        exposed = []
        for worker in range(self.timeline.schedule.num_workers):
            lane, lengths = self.timeline.stalls(worker)
            number = lane.minibatches + late[lane.positions]
            again = sum_in_order(lengths[(number >= first) & (number < first + turns)])
            exposed.append(sum_in_order(lengths) + times * again)
        return tuple(exposed)

    @cached_property
    def full(self) -> Timeline:
        """The timeline of all turns, as if all had been simulated."""
        if self.repeat is None:
            return self.timeline
        return replace(self.timeline, outcome=unrolled(self.timeline.lowered, self.timeline.outcome, self.repeat))


def simulate_periodic(
    schedule: Schedule,
    rules: Rules,
    turns: int,
    durations: Durations = unit_costs,
    *,
    transport: Transport = Transport(),  # noqa: B008 - frozen
    overlap: bool = False,
) -> PeriodicTimeline:
    """As `simulate`, for many turns whose times do not depend on the micro-batch, at the price of a few.

    Exact: equal to simulating all turns with the same times, which are rounded so that their sums are exact
    (`engine.rounded`). Where nothing repeats soon enough, or parts of the pipeline go at different paces, all turns are
    simulated. Raises ScheduleError at a deadlock.
    """
    lowered = lower(schedule, rules, overlap=overlap)
    table, moves = rounded(turns + max(lowered.late), table_of(lowered, durations), transfers(lowered, transport))
    queues = moves.rendezvous or bool((moves.queue[:, 1:] >= 0).any())
    few = max(lowered.late) + LIKELY + queues * schedule.num_workers // 2
    while few <= (QUEUEING if queues else WORTHWHILE) * turns:
        few += (turns - few) % LIKELY
        timeline = run_to_end(lowered, rules, few, table, moves)
        repeat = repeating(lowered, timeline.outcome, queues=queues)
        if repeat is not None and (turns - few) % repeat.turns == 0:
            return PeriodicTimeline(timeline, repeat._replace(times=(turns - few) // repeat.turns))
        few += few // 2 if repeat is None else (turns - few) % repeat.turns
    return PeriodicTimeline(run_to_end(lowered, rules, turns, table, moves), None)


def repeating(lowered: Lowered, outcome: SimulatedTimes, *, queues: bool) -> Repeat | None:
    """The periodic part of a simulation, if it has one that proves that it goes on.

    From turn `first` to the last full one everything must be as it was so many turns ago, and later by the same time.
    Without queues a turn follows from as many turns before it as a value may wait. Where messages queue, what happens
    next follows from the state of all lanes at one moment: there must be a moment such that all that is then under way,
    and all that is under way one period later, lies within these turns.
    """
    reach = farthest(lowered)
    begins, ends = by_turn(lowered, outcome, outcome.turns - reach)
    for turns in range(1, begins.shape[1] // 2 + 1):
        time = begins[0, -1] - begins[0, -1 - turns]
        if (begins[:, -1] - begins[:, -1 - turns] == time).all():
            same = [(times[:, turns:] - times[:, :-turns] == time).all(axis=0) for times in (begins, ends)]
            differs = np.flatnonzero(~(same[0] & same[1]))
            first = int(differs[-1]) + 1 if differs.size else 0
            last = begins.shape[1] - 1
            if first + turns + reach > last:
                return None
            if queues and ends[:, first + reach].max() + time >= begins[:, last - reach].min():
                return None
            return Repeat(first + reach + max(lowered.late), turns, float(time), 0)
    return None


def by_turn(lowered: Lowered, outcome: SimulatedTimes, until: int) -> tuple[Floats, Floats]:
    """When everything that belongs to a full turn before `until` began, and when it ended; a column a turn."""
    numbers = np.arange(max(lowered.late), max(until, max(lowered.late)))
    late = np.array(lowered.late, np.int64)
    came = np.flatnonzero((outcome.arrivals >= 0).any(axis=1)).tolist()
    sent = [value for value in came if lowered.passings[value].receiver is not None]
    of_actions = numbers - late[:, None]
    of_values = numbers - late[sources_of(lowered, sent), None]
    actions, values = np.arange(len(late))[:, None], np.array(sent, np.int64)[:, None]
    begins, ends = [outcome.starts[actions, of_actions]], [outcome.ends[actions, of_actions]]
    if sent:
        begins.append(outcome.sent[values, of_values])
        ends.append(outcome.arrivals[values, of_values])
    linked = [v for v, times in enumerate(outcome.linked) if (times >= 0).any()]
    if linked:
        begins.append(outcome.linked[np.array(linked)[:, None], numbers - late[sources_of(lowered, linked), None]])
    return np.concatenate(begins), np.concatenate(ends)


def sources_of(lowered: Lowered, values: list[int]) -> Whole:
    """The actions that make these values."""
    return np.array([lowered.passings[value].source for value in values], np.int64)


def turn_numbers(late: Sequence[int], turns: int) -> Whole:
    """The turn in which each action (rows) is run for each minibatch (columns)."""
    return np.asarray(np.array(late, np.int64)[:, None] + np.arange(turns))


def unrolled(lowered: Lowered, outcome: SimulatedTimes, repeat: Repeat) -> SimulatedTimes:
    """The times of all turns from those of a few."""
    turns = outcome.turns + repeat.turns * repeat.times

    def whole(times: Floats, late: Sequence[int]) -> Floats:
        again = np.clip((turn_numbers(late, turns) - repeat.first) // repeat.turns, 0, repeat.times)
        columns = np.arange(turns) - again * repeat.turns
        simulated = np.take_along_axis(times, columns, axis=1)
        return np.where(simulated < 0, simulated, simulated + again * repeat.time)

    sources = [lowered.late[passing.source] for passing in lowered.passings]
    starts = whole(outcome.starts, lowered.late)
    within = np.argsort(np.argsort(outcome.ranks[np.arange(len(lowered.late)), repeat.first - np.array(lowered.late)]))
    number = turn_numbers(lowered.late, turns)
    order = np.lexsort((np.broadcast_to(within[:, None], number.shape).ravel(), number.ravel(), starts.ravel()))
    ranks = np.empty(order.size, np.int64)
    ranks[order] = np.arange(order.size)
    return SimulatedTimes(
        turns,
        outcome.durations,
        starts=starts,
        ranks=ranks.reshape(starts.shape),
        sent=whole(outcome.sent, sources),
        linked=whole(outcome.linked, sources) if outcome.linked.size else np.zeros((0, turns)),
        arrivals=whole(outcome.arrivals, sources),
        done=starts.size,
    )
