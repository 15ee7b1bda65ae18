"""The result of a simulation: when each action and message began and ended, and figures derived from these times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stretto.schedule import Action, Edge, Rules, Schedule
from stretto.schedule.action import Span
from stretto.schedule.lower import COLLECTIVES, Lane, Lowered
from stretto.simulate.engine import Floats, SimulatedTimes, Transfers, Whole
from stretto.tracing.recording import Recording, channel, worker_name


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


UNIT = 1_000_000  # nanoseconds that stand for one unit of simulated time: Perfetto then shows units as milliseconds


def recordings(timeline: Timeline, rules: Rules, *, unit: float = UNIT) -> list[Recording]:
    """One recording a worker: its actions, the waits between them, its messages.

    A wait is named after the action whose value arrived last. Messages that take time have spans on the lanes "send"
    and "receive", collectives that overlap with computing on "collective". `unit`: nanoseconds per unit of simulated
    time.
    """
    schedule = timeline.schedule
    by_worker = [Recording(worker, name=worker_name(worker, schedule)) for worker in range(schedule.num_workers)]
    arrivals = {Edge(m.value, m.source, m.stage): m.arrival for m in timeline.messages}
    beside = timeline.lowered.beside
    free = [0.0] * len(by_worker)

    def at(time: float) -> int:
        return round(time * unit)

    for span in timeline.spans:
        recording = by_worker[span.worker]
        if span.action.kind in beside:
            recording.span("collective", span.action, at(span.start), at(span.end))
        else:
            if span.start > free[span.worker]:
                recording.span("wait", last_of(span, rules, arrivals), at(free[span.worker]), at(span.start))
            recording.span("compute", span.action, at(span.start), at(span.end))
            free[span.worker] = span.end
        for edge in rules.makes(span.action):
            if schedule.worker_of.get(edge.stage, span.worker) == span.worker:  # the caller has no worker: no message
                arrivals[edge] = span.end
            else:
                recording.sent(channel(edge), span.action.microbatch, at(span.end))
    for message in timeline.messages:
        record(message, by_worker, at)
    return by_worker


def record(message: SimulatedMessage, by_worker: Sequence[Recording], at: Callable[[float], int]) -> None:
    """Write a message on the lanes of the workers that send and receive it."""
    _, source, _, sender, receiver, sent, arrival, hold = message
    name = channel(Edge(message.value, source, message.stage))
    by_worker[receiver].received(name, source.microbatch, at(arrival))
    if hold:
        by_worker[sender].span("send", f"{name} {source.microbatch}", at(sent), at(sent + hold))
        by_worker[receiver].span("receive", f"{name} {source.microbatch}", at(arrival - hold), at(arrival))


def last_of(span: Span, rules: Rules, arrivals: Mapping[Edge, float]) -> str:
    """The source of the last value to arrive, of those that a span needs; its stage's merge if it needs none."""
    needs = [edge for edge in rules.needs(span.action) if edge in arrivals]
    last = max(needs, key=arrivals.__getitem__, default=None)
    return f"{span.action.stage}M" if last is None else str(last.source)
