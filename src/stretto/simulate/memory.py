"""How many bytes every worker holds over time: values that its actions have made and others have not yet freed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.schedule import Action
from stretto.schedule.lower import LATE
from stretto.simulate.engine import Floats, Whole
from stretto.simulate.network import Sizes
from stretto.simulate.timeline import Timeline

SENT, ARRIVING = -1, 1 << 62  # the places of messages among what happens at the same time: see `ledgers`
Entry = tuple[Floats, Whole, float]  # times, places among what happens at the same time, and the change in bytes


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
        """When the worker first holds the most."""
        return float(self.times[int(self.held.argmax())])


def ledgers(timeline: Timeline, sizes: Sizes, resident: Sequence[float] | None = None) -> tuple[Ledger, ...]:
    """The ledger of every worker; it holds `resident[worker]` bytes all the time: weights, optimizer's state.

    What an action makes is held from its start, what it frees until its end (`Rules.makes`, `Rules.frees`). A value for
    another worker is held by its sender until the send lane is done with it, and by its receiver from when it begins to
    come in. What the loader gives is not counted. `sizes` are the bytes of a value: of a graph, an activation, a
    version of weights. At the same time messages that have left go first, then ends and starts of actions in the
    worker's order, then messages that begin to come.
    """
    workers = timeline.schedule.num_workers
    entries: list[list[Entry]] = [[] for _ in range(workers)]
    for worker, entry in (*of_actions(timeline, sizes), *of_messages(timeline, sizes)):
        entries[worker].append(entry)
    base = resident or [0.0] * workers
    return tuple(ledger(timeline, worker, entries[worker], base[worker]) for worker in range(workers))


def ledger(timeline: Timeline, worker: int, entries: list[Entry], base: float) -> Ledger:
    """Add up a worker's changes in their order."""
    times = np.concatenate([np.zeros(1), *(times for times, _, _ in entries)])
    places = np.concatenate([np.full(1, SENT - 1), *(places for _, places, _ in entries)])
    changes = np.concatenate([np.full(1, base), *(np.full(times.size, change) for times, _, change in entries)])
    order = np.lexsort((places, times))
    held = np.cumsum(changes[order])
    first = order[int(held.argmax())]
    return Ledger(times[order], held, last_begun(timeline, worker, float(times[first]), int(places[first])))


def last_begun(timeline: Timeline, worker: int, time: float, place: int) -> Action | None:
    """The last action that a worker had begun at a time and a place among what happens then."""
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
    """The place of the starts of actions among what happens at the same time; their ends come right after them."""
    late = np.array(timeline.lowered.late, np.int64)
    return 2 * ((minibatches + late[positions]) * len(timeline.lowered.actions) + positions)


def of_actions(timeline: Timeline, sizes: Sizes) -> Iterator[tuple[int, Entry]]:
    """Bytes that actions make when they start, and free when they end."""
    lowered, outcome, per_turn = timeline.lowered, timeline.outcome, timeline.schedule.per_turn
    homes, minibatches = timeline.schedule.worker_of, np.arange(outcome.turns)
    for position, action in enumerate(lowered.actions):
        worker = homes[action.stage]
        later = lowered.action(position, LATE)
        place = place_of(timeline, np.full(outcome.turns, position), minibatches)
        made = sum(sizes(edge) for edge in timeline.rules.makes(later) if edge.stage in homes)
        if made:
            yield worker, (outcome.starts[position], place, made)
        for edge in timeline.rules.frees(later):
            real = minibatches >= LATE - edge.source.microbatch // per_turn  # others are of before the first minibatch
            if edge.source.stage >= 0 and (freed := sizes(edge)):
                yield worker, (outcome.ends[position, real], place[real] + 1, -freed)


def of_messages(timeline: Timeline, sizes: Sizes) -> Iterator[tuple[int, Entry]]:
    """Bytes that leave their sender with a message, and bytes that begin to arrive."""
    outcome, homes = timeline.outcome, timeline.schedule.worker_of
    for value, passing in enumerate(timeline.lowered.passings):
        if passing.receiver is None or passing.edge is None:
            continue
        came = outcome.arrivals[value] >= 0
        bytes_, hold = sizes(passing.edge), timeline.transfers.hold[value]
        sent, arrivals = outcome.sent[value][came], outcome.arrivals[value][came]
        if bytes_:
            yield homes[passing.edge.source.stage], (sent + hold, np.full(sent.size, SENT), -bytes_)
            yield passing.receiver, (arrivals - hold, np.full(sent.size, ARRIVING), bytes_)
