"""What a simulation gives: when each action and message began and ended, and what can be read off that."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stretto.schedule import Action, Rules, Schedule
from stretto.schedule.lower import COLLECTIVES, Lane, Lowered
from stretto.schedule.span import Span
from stretto.simulate.engine import Floats, SimulatedTimes, Transfers, Whole


class SimulatedMessage(NamedTuple):
    """A value on its way: `sender`'s send lane is busy from `sent` to `sent + hold`, `receiver`'s receive lane at the
    end, from `arrival - hold` to `arrival`.
    """

    value: str
    source: Action
    stage: int
    sender: int
    receiver: int
    sent: float
    arrival: float
    hold: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each action of a lowered schedule and each message began and ended, and what each worker's time went into.

    Times are in the unit of the durations. Everything is worked out when it is first asked for.
    """

    lowered: Lowered
    rules: Rules
    transfers: Transfers
    outcome: SimulatedTimes

    @property
    def schedule(self) -> Schedule:
        """The schedule that was simulated."""
        return self.lowered.schedule

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All actions, none before one that it waits for."""
        outcome, turns = self.outcome, self.outcome.turns
        starts, ends = outcome.starts.ravel().tolist(), outcome.ends.ravel().tolist()
        workers = [lane.worker for lane in self.lowered.lanes for _ in range(lane.first, lane.last)]
        spans = []
        for at in np.argsort(outcome.ranks, axis=None, kind="stable").tolist():
            position, minibatch = divmod(at, turns)
            action = self.lowered.action(position, minibatch)
            spans.append(Span(workers[position], action, starts[at], ends[at]))
        return tuple(spans)

    @cached_property
    def messages(self) -> tuple[SimulatedMessage, ...]:
        """All messages that arrived, those of each sender in its order."""
        messages = []
        for value, passing in enumerate(self.lowered.passings):
            if passing.receiver is None or passing.edge is None:
                continue
            sender = self.lowered.lanes[self.lowered.lane_of[passing.source]].worker
            hold = float(self.transfers.hold[value])
            sent, arrivals = self.outcome.sent[value].tolist(), self.outcome.arrivals[value].tolist()
            for minibatch in range(self.outcome.turns):
                if arrivals[minibatch] >= 0:
                    source = self.lowered.action(passing.source, minibatch)
                    ends = (sender, passing.receiver, sent[minibatch], arrivals[minibatch])
                    messages.append(SimulatedMessage(passing.edge.value, source, passing.edge.stage, *ends, hold))
        return tuple(sorted(messages, key=lambda message: (message.sender, message.sent)))

    @cached_property
    def makespan(self) -> float:
        """From the start to the end of the last action."""
        return float(self.outcome.ends.max()) if self.outcome.starts.size else 0.0

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each worker computes; what replicas agree about (A, R, M) is communication."""
        busy = [0.0] * self.schedule.num_workers
        computes = np.array([action.kind not in COLLECTIVES for action in self.lowered.actions])
        for lane in self.lowered.lanes:
            times = self.lane_times(lane)
            lengths = (times.ends - times.starts)[computes[times.positions]]
            busy[lane.worker] += sum_in_order(lengths)
        return tuple(busy)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """Time each worker waits for communication: for messages on their way, and while its replicas agree.

        An action waits for messages as long as it starts later than it could if every value were available to it as
        soon as it is made. Replicas that agree beside the computation keep nobody waiting.
        """
        return tuple(sum_in_order(self.stalls(worker)[1]) for worker in range(self.schedule.num_workers))

    def stalls(self, worker: int) -> "tuple[LaneTimes, Floats]":
        """The actions of a worker's compute lane, and how long each of them waited for communication."""
        lane = self.lane_times(self.lowered.lanes[worker])
        free = np.concatenate(([0.0], lane.ends[:-1]))[: lane.starts.size]
        possible = np.maximum(free, self._needs_made[lane.positions, lane.minibatches])
        agrees = np.array([action.kind in COLLECTIVES for action in self.lowered.actions])[lane.positions]
        return lane, lane.starts - possible + (lane.ends - lane.starts) * agrees

    def lane_times(self, lane: Lane) -> "LaneTimes":
        """When each action of a lane began and ended, in the lane's order."""
        lane_positions = np.arange(lane.first, lane.last)
        late = np.array(self.lowered.late, np.int64)[lane_positions]
        turns = self.outcome.turns
        minibatches = np.arange(turns + late.max(initial=0))[:, None] - late
        issued = (minibatches >= 0) & (minibatches < turns)
        positions, minibatches = np.broadcast_to(lane_positions, issued.shape)[issued], minibatches[issued]
        starts = self.outcome.starts[positions, minibatches]
        durations = self.outcome.durations
        lengths = durations[positions, minibatches if durations.shape[1] > 1 else 0]
        return LaneTimes(positions, minibatches, starts, starts + lengths)

    @cached_property
    def _needs_made(self) -> Floats:
        # When the last value that an action waits for had been made; the result of a collective: when that began.
        made = np.zeros_like(self.outcome.starts)
        ends, turns = self.outcome.ends, self.outcome.turns
        for passing in self.lowered.passings:
            if passing.user is not None:
                beside = self.lowered.lane_of[passing.source] >= self.schedule.num_workers
                times = (self.outcome.starts if beside else ends)[passing.source]
                users = slice(max(0, -passing.back), turns + min(0, -passing.back))  # minibatches
                sources = slice(users.start + passing.back, users.stop + passing.back)
                made[passing.user, users] = np.maximum(made[passing.user, users], times[sources])
        return made

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the time in which each worker computes."""
        return tuple(busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time as a share of all workers' time."""
        total = self.makespan * self.schedule.num_workers
        return max(0.0, (total - sum(self.busy)) / total) if total else 0.0

    @cached_property
    def peak_graphs(self) -> tuple[int, ...]:
        """The most forwards that each stage held at once for their backward."""
        return self._most_held({"graph"}, [span.action.stage for span in self.spans], self.schedule.num_stages)

    @cached_property
    def peak_inputs(self) -> tuple[int, ...]:
        """The most inputs that each stage held at once for their recompute."""
        return self._most_held({"input"}, [span.action.stage for span in self.spans], self.schedule.num_stages)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Graphs and inputs that each worker held at once, all its stages together."""
        return self._most_held({"graph", "input"}, [span.worker for span in self.spans], self.schedule.num_workers)

    def _most_held(self, values: set[str], places: Sequence[int], size: int) -> tuple[int, ...]:
        held, peak = [0] * size, [0] * size
        for span, place in zip(self.spans, places, strict=True):
            held[place] += sum(edge.value in values for edge in self.rules.makes(span.action))
            held[place] -= sum(edge.value in values for edge in self.rules.frees(span.action))
            peak[place] = max(peak[place], held[place])
        return tuple(peak)


class LaneTimes(NamedTuple):
    """The actions of a lane in its order: positions in the lowered schedule, minibatches, times."""

    positions: Whole
    minibatches: Whole
    starts: Floats
    ends: Floats


def sum_in_order(lengths: Floats) -> float:
    """The sum of times, added up one after the other: numpy's own order depends on how many there are."""
    return float(np.cumsum(lengths)[-1]) if lengths.size else 0.0
