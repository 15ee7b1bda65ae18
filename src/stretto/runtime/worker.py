"""One worker of a schedule, in a process of its own: it walks its list, and waits where a value has not arrived."""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import lcm
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.errors import ScheduleError
from stretto.replicas.reducer import ReplicaReducer
from stretto.runtime.channel import Channel, Inbox, Mailbox, Outbox, Received, receivers
from stretto.runtime.failure import Status
from stretto.runtime.serialize import as_tensor, as_text
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.dataflow import Tie
from stretto.stage.interpreter import OF_STAGE, Interpreter, count
from stretto.stage.intra_stage import StageSharing
from stretto.stage.stage import Stage
from stretto.tracing import Recording
from stretto.tracing.recording import channel as name

ROUNDS = 8  # of asking what time it is elsewhere


class Route(NamedTuple):
    """Where a value goes, and whether it is used here, too."""

    channels: tuple[Channel, ...]
    here: bool


class Worker(Interpreter):
    """Runs one worker's actions in their order. What other workers need of the results is sent at once.

    After turn n every worker gets the loss of minibatch n - lag, so that none is more than `lag` ahead of the last
    stage. `peers` are the same worker in other replicas, None if there are none; `within`
    is how it shares its stages.
    """

    def __init__(
        self,
        schedule: Schedule,
        rules: Rules,
        stages: Mapping[int, Stage],
        delays: Delays | None,
        *,
        worker: int,
        mailbox: Mailbox,
        lag: int,
        status: Status,
        peers: ReplicaReducer | None = None,
        within: StageSharing,
    ) -> None:
        super().__init__(schedule, rules, stages, delays)
        self._peers = peers
        self._within = within
        self.worker = worker
        self._mailbox = mailbox
        self._lag = lag
        self._status = status
        self.recording: Recording | None = None
        self._told = 0  # the first minibatch whose loss has not been told
        self._routes: dict[tuple[str, int, int], list[Route]] = {}
        self._cycle = lcm(*(tie.every for tie in rules.ties))  # after so many micro-batches routes are the same again
        self._borrowed: dict[Channel, Received] = {}  # the newest tied weights that have arrived

    def step(self, n: int, loads: Sequence[Mapping[str, Any]]) -> None:
        if self._peers is not None:
            self._peers.begin()
        super().step(n, loads)
        self._hear(n - self._lag + 1)

    def losses(self, edges: Sequence[Edge]) -> list[Tensor]:
        own = super().losses(edges)
        if self._peers is None:
            return own
        total = torch.stack(own)
        self._peers.add_up([total], lambda: None)
        return list(total)

    def pause(self) -> None:
        if self._peers is not None:
            self._peers.leave()

    def settle(self) -> None:
        if self._peers is not None:
            self._peers.finish()
        super().settle()

    def begin(self, n: int) -> None:
        self._told = n
        super().begin(n)

    def restart(self, n: int) -> None:
        """Turn n comes next; whatever was in flight is dropped, by every worker at the same time."""
        self._mailbox.clear()
        self._borrowed.clear()
        self._since = n * self.schedule.per_turn  # nothing has been updated since
        super().restart(n)

    def _issue(self, n: int, until: int | None) -> None:
        losses: list[tuple[Edge, Route]] = []
        after = self._tells_after
        telling = after and after._replace(microbatch=n * self.schedule.per_turn + after.microbatch)
        for action in self.schedule.turn(self.worker, n, until, self._since):
            flow = self.rules.flow(action, self._since)
            for edge in flow.needs:
                if edge not in self.values:
                    self._fetch(edge, action)
            self._status.acts(action)
            with self._within.working():
                self._run(action, flow)
            for edge, route in zip(flow.makes, self._routes_of(action, flow.makes), strict=True):
                if edge.value == "loss":
                    losses.append((edge, route))
                else:
                    self._send(edge, route, flow.makes)
            if losses and action == telling:
                self._tell(losses)
                losses = []
        if losses:  # of a part of a turn, as a drain has it, or where this worker sends nothing
            self._tell(losses)

    @cached_property
    def _tells_after(self) -> Action | None:
        # Of the body: what follows the last action that sends, as an update: what that one sends is waited for, and not
        # to be delayed. Nobody waits for what comes then, weight gradients and updates.
        body = self.schedule.body[self.worker]
        later = self._cycle * self.schedule.per_turn * (self.schedule.drain + 1)  # no micro-batch is before the first
        for index, action in reversed(list(enumerate(body))):
            once = action._replace(microbatch=later + action.microbatch)
            if any(route.channels for route in self._routes_of(once, self.rules.makes(once))):
                return body[min(index + 1, len(body) - 1)]
        return None

    def _finish(self, until: int) -> None:
        self._hear(until // self.schedule.per_turn)
        for tie in self.rules.ties:
            if tie.user in self.stages and tie.owner not in self.stages:
                self._settle(tie, until)
        self._mailbox.settle()

    def _fetch(self, edge: Edge, action: Action | None = None) -> None:
        home = self.schedule.worker_of.get(edge.source.stage, self.worker)
        if home == self.worker:
            raise ScheduleError(
                f"deadlock: {action} on worker {self.worker} waits for the {edge.value} of {edge.source}, which comes "
                "after it on the same worker, or was not loaded"
            )
        channel = Channel.of(edge, self.worker)
        while edge not in self.values:
            self._receive(channel, f"the {edge.value} of {edge.source}")

    def _receive(self, channel: Channel, what: str | None = None) -> None:
        start = 0 if self.recording is None else perf_counter_ns()
        received = self._mailbox.receive(channel, what)
        if channel.value == "tied-weight":
            self._borrowed[channel] = received
        source = Action(channel.kind, channel.stage, received.microbatch)
        values = self._told_by(received) if channel.value == "loss" else self._brought(channel, source, received.value)
        if received.microbatch >= self._since:
            self.values.update(values)
        if self.recording is not None:
            now = perf_counter_ns()
            self.recording.span("wait", f"{channel.value} of {source}", start, now)
            self.recording.received(name_of(next(iter(values)), self.worker), received.microbatch, now)

    def _brought(self, channel: Channel, source: Action, value: Any) -> dict[Edge, Any]:
        return {
            edge: value
            for edge in self.rules.makes(source)
            if edge.value == channel.value and edge.stage in self.stages
        }

    def _told_by(self, received: Received) -> dict[Edge, Any]:
        microbatches, losses = received.value
        return {self.rules.loss(m): loss for m, loss in zip(microbatches.tolist(), losses.unbind(), strict=True)}

    def _send(self, edge: Edge, route: Route, made: Sequence[Edge]) -> None:
        for channel in route.channels:
            value = self._united(channel, made) if edge.value in OF_STAGE else self.values[edge]
            self._mail(channel, edge, value)
        if not route.here:
            del self.values[edge]

    def _united(self, channel: Channel, made: Sequence[Edge]) -> dict[int, Tensor]:
        # What several stages of one worker get, by the numbers of weights: each of them finds its own.
        values: dict[int, Tensor] = {}
        for edge in made:
            if edge.value == channel.value and self.schedule.worker_of[edge.stage] == channel.worker:
                values |= self.values[edge]
        return values

    def _tell(self, losses: Sequence[tuple[Edge, Route]]) -> None:
        # Nobody computes with losses: those of a turn go out together, when nothing else of it has to. They do not wait
        # for its end: a first stage that has done its part begins the next one only when it has heard of them.
        first, route = losses[0]
        microbatches = torch.tensor([edge.source.microbatch for edge, _ in losses])
        told = microbatches, torch.stack([self.values[edge] for edge, _ in losses])
        for channel in route.channels:
            self._mail(channel, first, told)

    def _mail(self, channel: Channel, edge: Edge, value: Any) -> None:
        self._mailbox.send(channel, value, edge.source.microbatch)
        if self.recording is not None:
            self.recording.sent(name_of(edge, channel.worker), edge.source.microbatch, perf_counter_ns())

    def _routes_of(self, action: Action, made: Sequence[Edge]) -> Sequence[Route]:
        # For each edge that the action made.
        key = action.kind, action.stage, action.microbatch % self._cycle
        if key not in self._routes:
            self._routes[key] = self._routed(made)
        return self._routes[key]

    def _routed(self, made: Sequence[Edge]) -> list[Route]:
        # What several of the edges bring to one worker goes there once.
        used: set[Channel] = set()
        routes: list[Route] = []
        for edge in made:
            to = receivers(edge, self.schedule)
            others = {Channel.of(edge, worker) for worker in to if worker != self.worker} - used
            routes.append(Route(tuple(sorted(others)), here=self.worker in to))
            used |= others
        return routes

    def _hear(self, until: int) -> None:
        for minibatch in range(self._told, until):
            for piece in range(self.schedule.per_turn):
                edge = self.rules.loss(minibatch * self.schedule.per_turn + piece)
                if edge.source.stage not in self.stages:
                    self._fetch(edge)
        self._told = max(self._told, until)

    def _settle(self, tie: Tie, until: int) -> None:
        # The owner's last version is what its weights are now.
        pieces = self.schedule.per_turn
        updates = [action for action in self.schedule.of_stage(tie.owner) if action.kind == "U"]
        last = max(until - pieces + update.microbatch % pieces for update in updates)
        last -= (last + 1) % tie.every  # the last one that is sent
        if last < self._since:
            return
        channel = Channel("tied-weight", "U", tie.owner, self.worker)
        while channel not in self._borrowed or self._borrowed[channel].microbatch < last:
            self._receive(channel)
        if tie.shares:
            self.stages[tie.user].take_over(self._borrowed[channel].value)


def name_of(edge: Edge, worker: int) -> str:
    """What a message is called in a trace. Several workers get the same loss."""
    return f"{name(edge)} for worker {worker}" if edge.value == "loss" else name(edge)


class WorkerRecorder:
    """What a worker calls after each action; `finish` waits until the device has done what it was told."""

    def __init__(self, worker: Interpreter, recording: Recording, finish: Callable[[], object] | None) -> None:
        self._worker, self._recording, self._finish = worker, recording, finish

    def __call__(self, action: Action, operands: Mapping[str, Any], start: int, end: int) -> None:
        if self._finish is not None:
            self._finish()
            end = perf_counter_ns()
        self._recording.span("compute", action, start, end)
        count(self._recording, self._worker, action, operands, end)


def offset_to_first(out: Outbox, box: Inbox) -> int:
    """Nanoseconds to add to this process's clock for that of rank 0, which runs `tell_time`.

    Processes of one machine have one clock. For others the shortest of several round trips is halved.
    """
    out.send(as_tensor(socket.gethostname().encode()))
    if not int(box.receive().value):
        return 0
    trips = []
    for _ in range(ROUNDS):
        before = perf_counter_ns()
        out.send(None)
        there = int(box.receive().value)
        after = perf_counter_ns()
        trips.append((after - before, there - (before + after) // 2))
    return min(trips)[1]


def tell_time(out: Outbox, box: Inbox) -> None:
    """Rank 0's part of `offset_to_first`, for one other process."""
    other = as_text(box.receive().value).decode() != socket.gethostname()
    out.send(torch.tensor(int(other)))
    for _ in range(ROUNDS * other):
        box.receive()
        out.send(torch.tensor(perf_counter_ns()))
