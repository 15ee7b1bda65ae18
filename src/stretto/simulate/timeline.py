"""What a simulation gives: when everything was, and what can be read off it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stretto.schedule import Action, Rules, Schedule
from stretto.schedule.lower import COLLECTIVES, Lane, Lowered
from stretto.schedule.span import Span
from stretto.simulate.engine import Floats, Outcome, Whole, Wires


class Message(NamedTuple):
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
    """When each action of a lowered schedule and each message began and ended; a worker's time by what it does.

    What is read off is worked out when it is first asked for.
    """

    lowered: Lowered
    rules: Rules
    wires: Wires
    outcome: Outcome

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
        made = []
        for at in np.argsort(outcome.ranks, axis=None, kind="stable").tolist():
            position, minibatch = divmod(at, turns)
            action = self.lowered.action(position, minibatch)
            made.append(Span(workers[position], action, starts[at], ends[at]))
        return tuple(made)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages that arrived, those of each sender in its order."""
        made = []
        for value, passing in enumerate(self.lowered.passings):
            if passing.receiver is None or passing.edge is None:
                continue
            sender = self.lowered.lanes[self.lowered.lane_of[passing.source]].worker
            hold = float(self.wires.hold[value])
            sent, arrivals = self.outcome.sent[value].tolist(), self.outcome.arrivals[value].tolist()
            for minibatch in range(self.outcome.turns):
                if arrivals[minibatch] >= 0:
                    source, times = (
                        self.lowered.action(passing.source, minibatch),
                        (sent[minibatch], arrivals[minibatch]),
                    )
                    made.append(
                        Message(passing.edge.value, source, passing.edge.stage, sender, passing.receiver, *times, hold)
                    )
        return tuple(sorted(made, key=lambda message: (message.sender, message.sent)))

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
            walk = self.walk(lane)
            lengths = (walk.ends - walk.starts)[computes[walk.positions]]
            busy[lane.worker] += in_turn(lengths)
        return tuple(busy)

    @cached_property
    def exposed(self) -> tuple[float, ...]:
        """Time each worker stands still because of communication.

        An action that starts later than it would if what it waits for were there once it is made: the difference. And
        what replicas agree about, where the worker does not compute beside it.
        """
        return tuple(in_turn(self.standing(worker)[1]) for worker in range(self.schedule.num_workers))

    def standing(self, worker: int) -> "tuple[Walk, Floats]":
        """The actions of a worker's compute lane, and how long it stands still for communication at each."""
        walk = self.walk(self.lowered.lanes[worker])
        free = np.concatenate(([0.0], walk.ends[:-1]))[: walk.starts.size]
        there = np.maximum(free, self._made_for[walk.positions, walk.minibatches])
        agrees = np.array([action.kind in COLLECTIVES for action in self.lowered.actions])[walk.positions]
        return walk, walk.starts - there + (walk.ends - walk.starts) * agrees

    def walk(self, lane: Lane) -> "Walk":
        """The actions of a lane in its order."""
        own = np.arange(lane.first, lane.last)
        late = np.array(self.lowered.late, np.int64)[own]
        turns = self.outcome.turns
        minibatches = np.arange(turns + late.max(initial=0))[:, None] - late
        issued = (minibatches >= 0) & (minibatches < turns)
        positions, minibatches = np.broadcast_to(own, issued.shape)[issued], minibatches[issued]
        starts = self.outcome.starts[positions, minibatches]
        durations = self.outcome.durations
        lengths = durations[positions, minibatches if durations.shape[1] > 1 else 0]
        return Walk(positions, minibatches, starts, starts + lengths)

    @cached_property
    def _made_for(self) -> Floats:
        # Of each action: when the last of what it waits for had been made; a collective's result when that began.
        made = np.zeros_like(self.outcome.starts)
        ends, turns = self.outcome.ends, self.outcome.turns
        for passing in self.lowered.passings:
            if passing.user is not None:
                beside = self.lowered.lane_of[passing.source] >= self.schedule.num_workers
                times = (self.outcome.starts if beside else ends)[passing.source]
                there = slice(max(0, -passing.back), turns + min(0, -passing.back))
                of = slice(there.start + passing.back, there.stop + passing.back)
                made[passing.user, there] = np.maximum(made[passing.user, there], times[of])
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
        return self._most({"graph"}, [span.action.stage for span in self.spans], self.schedule.num_stages)

    @cached_property
    def peak_inputs(self) -> tuple[int, ...]:
        """The most inputs that each stage held at once for their recompute."""
        return self._most({"input"}, [span.action.stage for span in self.spans], self.schedule.num_stages)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Graphs and inputs that each worker held at once, all its stages together."""
        return self._most({"graph", "input"}, [span.worker for span in self.spans], self.schedule.num_workers)

    def _most(self, values: set[str], places: Sequence[int], size: int) -> tuple[int, ...]:
        held, peak = [0] * size, [0] * size
        for span, place in zip(self.spans, places, strict=True):
            held[place] += sum(edge.value in values for edge in self.rules.makes(span.action))
            held[place] -= sum(edge.value in values for edge in self.rules.frees(span.action))
            peak[place] = max(peak[place], held[place])
        return tuple(peak)


class Walk(NamedTuple):
    """The actions of a lane in its order: positions in the lowered schedule, minibatches, times."""

    positions: Whole
    minibatches: Whole
    starts: Floats
    ends: Floats


def in_turn(lengths: Floats) -> float:
    """Their sum, added up one after the other: the same whatever their number."""
    return float(np.cumsum(lengths)[-1]) if lengths.size else 0.0
