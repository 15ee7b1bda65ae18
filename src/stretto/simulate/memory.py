"""The bytes that every worker holds over time: values that actions have made and other actions have not yet freed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.schedule import Action
from stretto.schedule.lower import LATE
from stretto.simulate.engine import Floats, Whole
from stretto.simulate.network import Sizes
from stretto.simulate.timeline import Timeline

SENT, ARRIVING = -1, 1 << 62  # places of messages in the order of events at one time: see `ledgers`
Entry = tuple[Floats, Whole, float]  # times, places in the order of events at one time, and the change in bytes


@dataclass(frozen=True, eq=False)
class Ledger:
    """The bytes that a worker holds: `held[i]` from `times[i]` on; entries of one time are in the order of events."""

    times: Floats
    held: Floats
    peak_action: Action | None  # the last action begun when the worker first held the most; None before its first

    @property
    def peak(self) -> float:
        """The most bytes at once."""
        return float(self.held.max())

    @property
    def peak_time(self) -> float:
        """The time at which the worker first holds the most."""
        return float(self.times[int(self.held.argmax())])


def ledgers(timeline: Timeline, sizes: Sizes, resident: Sequence[float] | None = None) -> tuple[Ledger, ...]:
    """The ledger of every worker, which holds `resident[worker]` bytes all the time (weights, optimizer state).

    A value is held from the start of the action that makes it to the end of the action that frees it (`Rules.makes`,
    `Rules.frees`). A value for another worker is held by its sender until the send lane is done with it, and by its
    receiver from the time at which it begins to arrive. Values from the loader are not counted. `sizes` gives the bytes
    of a value: a graph, an activation, a version of weights. Events at one time are ordered: first messages that have
    left, then ends and starts of actions in the worker's order, then messages that begin to arrive.
    """
    workers = timeline.schedule.num_workers
    entries: list[list[Entry]] = [[] for _ in range(workers)]
    for worker, entry in (*action_entries(timeline, sizes), *message_entries(timeline, sizes)):
        entries[worker].append(entry)
    resident_bytes = resident or [0.0] * workers
    return tuple(ledger(timeline, worker, entries[worker], resident_bytes[worker]) for worker in range(workers))


def ledger(timeline: Timeline, worker: int, entries: list[Entry], resident: float) -> Ledger:
    """The ledger of one worker: the sums of its changes, in the order of events."""
    times = np.concatenate([np.zeros(1), *(times for times, _, _ in entries)])
    places = np.concatenate([np.full(1, SENT - 1), *(places for _, places, _ in entries)])
    changes = np.concatenate([np.full(1, resident), *(np.full(times.size, change) for times, _, change in entries)])
    order = np.lexsort((places, times))
    held = np.cumsum(changes[order])
    first = order[int(held.argmax())]
    return Ledger(times[order], held, last_begun(timeline, worker, float(times[first]), int(places[first])))


def last_begun(timeline: Timeline, worker: int, time: float, place: int) -> Action | None:
    last: tuple[float, int] | None = None
    for lane in timeline.lowered.lanes:
        if lane.worker == worker:
            times = timeline.lane_times(lane)
            places = place_of(timeline, times.positions, times.minibatches)
            before = np.flatnonzero((times.starts < time) | ((times.starts == time) & (places <= place)))
            if before.size:
                last = max(last or (-1.0, 0), (float(times.starts[before[-1]]), int(places[before[-1]])))
    if last is None:
        return None
    turn, position = divmod(last[1] // 2, len(timeline.lowered.actions))
    return timeline.lowered.action(position, turn - timeline.lowered.late[position])


def place_of(timeline: Timeline, positions: Whole, minibatches: Whole) -> Whole:
    """The places of starts of actions in the order of events at one time; an action's end has the next place."""
    late = np.array(timeline.lowered.late, np.int64)
    return 2 * ((minibatches + late[positions]) * len(timeline.lowered.actions) + positions)


def action_entries(timeline: Timeline, sizes: Sizes) -> Iterator[tuple[int, Entry]]:
    """Worker and entry of the bytes that actions make when they start, and free when they end."""
    lowered, outcome, per_turn = timeline.lowered, timeline.outcome, timeline.schedule.per_turn
    worker_of, minibatches = timeline.schedule.worker_of, np.arange(outcome.turns)
    for position, action in enumerate(lowered.actions):
        worker = worker_of[action.stage]
        later = lowered.action(position, LATE)
        place = place_of(timeline, np.full(outcome.turns, position), minibatches)
        made_bytes = sum(sizes(edge) for edge in timeline.rules.makes(later) if edge.stage in worker_of)
        if made_bytes:
            yield worker, (outcome.starts[position], place, made_bytes)
        for edge in timeline.rules.frees(later):
            exists = minibatches >= LATE - edge.source.microbatch // per_turn  # no value precedes the first minibatch
            if edge.source.stage >= 0 and (freed_bytes := sizes(edge)):
                yield worker, (outcome.ends[position, exists], place[exists] + 1, -freed_bytes)


def message_entries(timeline: Timeline, sizes: Sizes) -> Iterator[tuple[int, Entry]]:
    """Worker and entry of the bytes that leave a sender with a message, and of the bytes that begin to arrive."""
    outcome, worker_of = timeline.outcome, timeline.schedule.worker_of
    for value, passing in enumerate(timeline.lowered.passings):
        if passing.receiver is None or passing.edge is None:
            continue
        arrived = outcome.arrivals[value] >= 0
        num_bytes, hold = sizes(passing.edge), timeline.transfers.hold[value]
        sent, arrivals = outcome.sent[value][arrived], outcome.arrivals[value][arrived]
        if num_bytes:
            yield worker_of[passing.edge.source.stage], (sent + hold, np.full(sent.size, SENT), -num_bytes)
            yield passing.receiver, (arrivals - hold, np.full(sent.size, ARRIVING), num_bytes)
