"""Many turns at the price of a few: some turns are simulated, and the periodic part is multiplied.

The next step of a simulation follows from its state. Once the state equals that of some turns ago, with all times later
by one amount, the simulation repeats what it did since then, until no more minibatches enter. So simulating fewer
minibatches gives the same beginning and the same end, and the middle is a multiplication.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stretto.schedule import Rules, Schedule
from stretto.schedule.lower import COLLECTIVES, Lowered, lower
from stretto.schedule.pace import turns_apart
from stretto.simulate.engine import Floats, SimulatedTimes, Whole, rounded, transfers
from stretto.simulate.network import Transport
from stretto.simulate.simulator import Durations, run_to_end, table_of, unit_costs
from stretto.simulate.timeline import Timeline, sum_in_order

LIKELY = 60  # most periods, in turns, divide this number
WORTHWHILE = 0.6  # the largest share of all turns to simulate in search of a periodic part
QUEUEING = 0.3  # the same where messages queue: periods begin later there, and a turn takes several times as long


class Repeat(NamedTuple):
    """From turn `first` on, everything repeats after `turns` turns, `time` later; `times` repeats are not simulated."""

    first: int
    turns: int
    time: float
    times: int


@dataclass(frozen=True, eq=False)
class PeriodicTimeline:
    """Many turns: the `timeline` of the simulated ones, and which of them repeat (None: all turns were simulated)."""

    timeline: Timeline
    repeat: Repeat | None

    @property
    def turn(self) -> float | None:
        """The time of a turn in the periodic part; None if there is none."""
        return None if self.repeat is None else self.repeat.time / self.repeat.turns

    @property
    def makespan(self) -> float:
        """From the start to the end of the last action."""
        if self.repeat is None:
            return self.timeline.makespan
        lowered, outcome = self.timeline.lowered, self.timeline.outcome
        later = turn_numbers(lowered.late, outcome.turns) >= self.repeat.first
        early = float(outcome.ends[~later].max(initial=0))
        return max(early, float(outcome.ends[later].max()) + self.repeat.times * self.repeat.time)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each worker computes."""
        if self.repeat is None:
            return self.timeline.busy
        per_turn = [0.0] * self.timeline.schedule.num_workers
        for lane in self.timeline.lowered.lanes:
            for position in range(lane.first, lane.last):
                if self.timeline.lowered.actions[position].kind not in COLLECTIVES:
                    per_turn[lane.worker] += float(self.timeline.outcome.durations[position, 0])
        turns = self.repeat.turns * self.repeat.times
        return tuple(simulated + turns * added for simulated, added in zip(self.timeline.busy, per_turn, strict=True))

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
            repeated = sum_in_order(lengths[(number >= first) & (number < first + turns)])
            exposed.append(sum_in_order(lengths) + times * repeated)
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

    The result equals a simulation of all turns with the same times, which are rounded so that sums are exact
    (`engine.rounded`). All turns are simulated where nothing repeats soon enough, or where parts of the pipeline run at
    different paces, or where messages are late at random. Raises ScheduleError at a deadlock.
    """
    lowered = lower(schedule, rules, overlap=overlap)
    if transport.network.is_late:
        drawn = transfers(lowered, transport, turns)
        return PeriodicTimeline(run_to_end(lowered, rules, turns, table_of(lowered, durations), drawn), None)
    table, transfer_times = rounded(
        turns + max(lowered.late), table_of(lowered, durations), transfers(lowered, transport)
    )
    queues = transfer_times.rendezvous or bool((transfer_times.queue[:, 1:] >= 0).any())
    num_simulated = max(lowered.late) + LIKELY + queues * schedule.num_workers // 2
    while num_simulated <= (QUEUEING if queues else WORTHWHILE) * turns:
        num_simulated += (turns - num_simulated) % LIKELY
        timeline = run_to_end(lowered, rules, num_simulated, table, transfer_times)
        repeat = repeating(lowered, timeline.outcome, queues=queues)
        if repeat is not None and (turns - num_simulated) % repeat.turns == 0:
            return PeriodicTimeline(timeline, repeat._replace(times=(turns - num_simulated) // repeat.turns))
        num_simulated += num_simulated // 2 if repeat is None else (turns - num_simulated) % repeat.turns
    return PeriodicTimeline(run_to_end(lowered, rules, turns, table, transfer_times), None)


def repeating(lowered: Lowered, outcome: SimulatedTimes, *, queues: bool) -> Repeat | None:
    """The periodic part of a simulation; None unless the simulated turns prove that it goes on repeating.

    From some turn to the last full one, all times have to equal those of one period before, plus one amount. Without
    queues this has to hold for as many turns as a value may wait: the times of the next turn follow from these. Where
    messages queue, the next event follows from the state of all lanes at one moment. So there has to be a moment at
    which all actions and messages under way belong to these turns, and the same one period later.
    """
    reach = max([1, *(abs(turns_apart(lowered, value)) for value in range(len(lowered.passings)))])
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
    """When the actions and messages of full turns before turn `until` began and ended: a row each, a column a turn."""
    numbers = np.arange(max(lowered.late), max(until, max(lowered.late)))
    late = np.array(lowered.late, np.int64)
    arrived = np.flatnonzero((outcome.arrivals >= 0).any(axis=1)).tolist()
    sent = [value for value in arrived if lowered.passings[value].receiver is not None]
    action_minibatches = numbers - late[:, None]
    value_minibatches = numbers - late[sources_of(lowered, sent), None]
    actions, values = np.arange(len(late))[:, None], np.array(sent, np.int64)[:, None]
    begins, ends = [outcome.starts[actions, action_minibatches]], [outcome.ends[actions, action_minibatches]]
    if sent:
        begins.append(outcome.sent[values, value_minibatches])
        ends.append(outcome.arrivals[values, value_minibatches])
    linked = [v for v, times in enumerate(outcome.linked) if (times >= 0).any()]
    if linked:
        begins.append(outcome.linked[np.array(linked)[:, None], numbers - late[sources_of(lowered, linked), None]])
    return np.concatenate(begins), np.concatenate(ends)


def sources_of(lowered: Lowered, values: list[int]) -> Whole:
    """The positions of the actions that make these values."""
    return np.array([lowered.passings[value].source for value in values], np.int64)


def turn_numbers(late: Sequence[int], turns: int) -> Whole:
    """The turn in which each action (rows) is run for each minibatch (columns)."""
    return np.asarray(np.array(late, np.int64)[:, None] + np.arange(turns))


def unrolled(lowered: Lowered, outcome: SimulatedTimes, repeat: Repeat) -> SimulatedTimes:
    turns = outcome.turns + repeat.turns * repeat.times

    def whole(times: Floats, late: Sequence[int]) -> Floats:
        num_repeats = np.clip((turn_numbers(late, turns) - repeat.first) // repeat.turns, 0, repeat.times)
        columns = np.arange(turns) - num_repeats * repeat.turns
        simulated = np.take_along_axis(times, columns, axis=1)
        return np.where(simulated < 0, simulated, simulated + num_repeats * repeat.time)

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
