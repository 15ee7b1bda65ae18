"""The result of a simulation: when each action and message began and ended, and figures derived from these times."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stretto.schedule import Action, Rules, Schedule
from stretto.schedule.lower import COLLECTIVES, Lane, Lowered
from stretto.schedule.timed_action import Span
from stretto.simulate.engine import Floats, SimulatedTimes, Transfers, Whole


class SimulatedMessage(NamedTuple):
    """A value sent to another worker. The sender's send lane is busy from `sent` to `sent + hold`, the receiver's
    receive lane from `arrival - hold` to `arrival`.
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
    """When each action of a lowered schedule and each message began and ended, and how workers spent their time.

    Times are in the unit of the durations. Properties are computed at their first use.
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
        """All messages that arrived, by sender and then by time."""
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
        """The time that each worker computes; the agreement of replicas (A, R, M) counts as communication."""
        busy = [0.0] * self.schedule.num_workers
        computes = np.array([action.kind not in COLLECTIVES for action in self.lowered.actions])
        for lane in self.lowered.lanes:
            times = self.lane_times(lane)
            lengths = (times.ends - times.starts)[computes[times.positions]]
            busy[lane.worker] += sum_in_order(lengths)
        return tuple(busy)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """The time that each worker waits for communication: for messages, and while its replicas agree.

        An action's wait for messages is the time by which it starts later than if every value were available as soon
        as it is made. Replicas that agree while a worker computes do not keep it waiting.
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
        # The time at which the last value that an action waits for was made; for a collective's result, its beginning.
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
        """The most graphs of forwards that each stage held at once for their backwards."""
        return self._most_held({"graph"}, [span.action.stage for span in self.spans], self.schedule.num_stages)

    @cached_property
    def peak_inputs(self) -> tuple[int, ...]:
        """The most inputs that each stage held at once for recomputing."""
        return self._most_held({"input"}, [span.action.stage for span in self.spans], self.schedule.num_stages)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The most graphs and inputs that each worker held at once, in all its stages."""
        return self._most_held({"graph", "input"}, [span.worker for span in self.spans], self.schedule.num_workers)

    def _most_held(self, values: set[str], places: Sequence[int], size: int) -> tuple[int, ...]:
        held, peak = [0] * size, [0] * size
        for span, place in zip(self.spans, places, strict=True):
            held[place] += sum(edge.value in values for edge in self.rules.makes(span.action))
            held[place] -= sum(edge.value in values for edge in self.rules.frees(span.action))
            peak[place] = max(peak[place], held[place])
        return tuple(peak)


class LaneTimes(NamedTuple):
    """The actions of a lane in order: positions in the lowered schedule, minibatches, starts and ends."""

    positions: Whole
    minibatches: Whole
    starts: Floats
    ends: Floats


def sum_in_order(lengths: Floats) -> float:
    """The sum of times, added one after another: the order in which numpy adds depends on their number."""
    return float(np.cumsum(lengths)[-1]) if lengths.size else 0.0
