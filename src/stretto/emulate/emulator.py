"""Runs every worker of a schedule, and of its replicas, on one device in one process, with exact delays.

Emulated replicas meet in an all-reduce, or at parameter servers whose shards are all in this process.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial as bound
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from stretto.errors import ScheduleError, UsageError
from stretto.nn.devices import synchronizer
from stretto.replicas.parameter_server.client import Changes, Servers
from stretto.replicas.parameter_server.shard import Build, Cut, Piece, Shard
from stretto.replicas.reducer import ReplicaReducer, Then
from stretto.replicas.sync_options import ParameterServer
from stretto.schedule import Action, Delays, Edge, Rules, Schedule
from stretto.schedule.dataflow import Flow
from stretto.schedule.validity import explain
from stretto.stage.interpreter import Interpreter, count
from stretto.stage.stage import Stage
from stretto.tracing import Recording
from stretto.tracing.recording import channel, worker_name


class Emulator(Interpreter):
    """Each worker has a queue of actions; making a value wakes the worker whose next action waits for it."""

    def __init__(
        self, schedule: Schedule, rules: Rules, stages: Mapping[int, Stage], delays: Delays | None = None
    ) -> None:
        super().__init__(schedule, rules, stages, delays)
        self.queues: list[deque[tuple[Action, Flow]]] = [deque() for _ in schedule.body]
        self._waiting: dict[Edge, int] = {}
        self.may_run: Callable[[Action], bool] | None = None  # a further condition for running an action

    def restart(self, n: int) -> None:
        self._waiting.clear()
        for queue in self.queues:
            queue.clear()
        super().restart(n)

    def _finish(self, until: int) -> None:
        if any(self.queues):
            left = [deque(action for action, _ in queue) for queue in self.queues]
            raise ScheduleError(f"deadlock: {explain(left, self.rules, set(self.values))}")

    def _issue(self, n: int, until: int | None) -> None:
        self.enqueue(n, until)
        self.pump()

    def enqueue(self, n: int, until: int | None) -> None:
        """Append turn n's actions to the workers' queues, without those of micro-batches from `until` on."""
        for worker, queue in enumerate(self.queues):
            for action in self.schedule.turn(worker, n, until, self._since):
                queue.append((action, self.rules.flow(action, self._since)))

    def pump(self) -> bool:
        """Run actions until every worker waits or has none left. Returns whether any action ran."""
        ready = deque(range(len(self.queues)))
        before = sum(map(len, self.queues))
        while ready:
            self._advance(ready.popleft(), ready)
        return before != sum(map(len, self.queues))

    def _advance(self, worker: int, ready: deque[int]) -> None:
        queue = self.queues[worker]
        while queue:
            action, flow = queue[0]
            for edge in flow.needs:
                if edge not in self.values:
                    self._waiting[edge] = worker
                    return
            if self.may_run is not None and not self.may_run(action):
                return
            queue.popleft()
            self._run(action, flow)
            for edge in flow.makes:
                waiter = self._waiting.pop(edge, None)
                if waiter is not None:
                    ready.append(waiter)


def record(emulators: Sequence[Emulator], device: torch.device) -> list[Recording]:
    """Record emulators that take turns (the phases of a method) into the same recordings, one for each worker.

    An accelerator runs asynchronously, so each action ends with a wait for it.
    """
    widest = max((emulator.schedule for emulator in emulators), key=lambda schedule: schedule.num_workers)
    recordings = [Recording(worker, name=worker_name(worker, widest)) for worker in range(widest.num_workers)]
    for emulator in emulators:
        emulator.record = Recorder(emulator, recordings, synchronizer(device))
    return recordings


class Recorder:
    """Records an action; an emulator calls it after each one.

    A message is received at the time it is sent, as on one device values do not travel. The counters of a stage are its
    delay (updates between a micro-batch's forward and backward) and its stashed forwards, whose backward is to come.
    """

    def __init__(
        self, emulator: Emulator, recordings: Sequence[Recording], finish: Callable[[], object] | None
    ) -> None:
        self._emulator = emulator
        self._recordings = recordings
        self._finish = finish

    def __call__(self, action: Action, operands: Mapping[str, Any], start: int, end: int) -> None:
        """Record `action`, run from `start` to `end` ns, while the emulator's values still hold its inputs."""
        if self._finish is not None:
            self._finish()
            end = perf_counter_ns()
        worker_of = self._emulator.schedule.worker_of
        sender = worker_of[action.stage]
        recording = self._recordings[sender]
        recording.span("compute", action, start, end)
        for edge in self._emulator.rules.makes(action):
            receiver = worker_of.get(edge.stage, sender)
            if receiver != sender:
                name = channel(edge)
                recording.sent(name, action.microbatch, end)
                self._recordings[receiver].received(name, action.microbatch, end)
        count(recording, self._emulator, action, operands, end)


class EmulatedReplicas(Emulator):
    """All replicas run the same actions in the order that the first one decides.

    Observers and recordings see the first replica only.
    """

    def __init__(
        self, schedule: Schedule, rules: Rules, replicas: Sequence[Mapping[int, Stage]], delays: Delays | None = None
    ) -> None:
        super().__init__(schedule, rules, replicas[0], delays)
        self._others = [Emulator(schedule, rules, stages, delays) for stages in replicas[1:]]

    @property
    def every_stage(self) -> list[Stage]:
        """All replicas' stages: stage 0 of each replica in order, then stage 1 of each, and so on."""
        return [interpreter.stages[index] for index in self.stages for interpreter in (self, *self._others)]

    def load(self, n: int, loads: Sequence[Mapping[str, Any]]) -> None:
        count = self.schedule.per_turn
        super().load(n, loads[:count])
        for number, other in enumerate(self._others, start=1):
            other.load(n, loads[number * count : (number + 1) * count])

    def begin(self, n: int) -> None:
        super().begin(n)
        for other in self._others:
            other.begin(n)

    def restart(self, n: int) -> None:
        super().restart(n)
        for other in self._others:
            other.restart(n)

    def losses(self, edges: Sequence[Edge]) -> list[Tensor]:
        """The losses, each summed over the replicas in order."""
        total = torch.stack(super().losses(edges))
        for other in self._others:
            total = total + torch.stack(Interpreter.losses(other, edges))
        return list(total)

    def _run(self, action: Action, flow: Flow) -> None:
        super()._run(action, flow)
        for other in self._others:
            other._run(action, flow)


class OrderedReplicas(EmulatedReplicas):
    """Each replica runs as far as it can; a stage's U waits until the next update of that stage is the replica's.

    Results depend on each stage's order of updates only, so a replay of a logged order is exact.
    """

    def __init__(
        self, schedule: Schedule, rules: Rules, replicas: Sequence[Mapping[int, Stage]], delays: Delays | None = None
    ) -> None:
        super().__init__(schedule, rules, replicas, delays)
        self._emulators: list[Emulator] = [self, *self._others]
        for emulator in self._emulators:
            emulator.may_run = bound(is_next, emulator.stages)

    @property
    def idle(self) -> bool:
        return all(not emulator.values for emulator in self._emulators)

    @property
    def updates(self) -> int:
        return sum(emulator._updates for emulator in self._emulators)

    def has(self, edges: Sequence[Edge]) -> bool:
        return all(edge in emulator.values for emulator in self._emulators for edge in edges)

    def _issue(self, n: int, until: int | None) -> None:
        for emulator in self._emulators:
            emulator.enqueue(n, until)
        while any(emulator.pump() for emulator in self._emulators):
            pass

    def _run(self, action: Action, flow: Flow) -> None:
        Interpreter._run(self, action, flow)

    def _finish(self, until: int) -> None:
        waiting = [(r, queue[0][0]) for r, emulator in enumerate(self._emulators) for queue in emulator.queues if queue]
        updates = [f"{action} of replica {r}" for r, action in waiting if action.kind == "U"]
        if updates:
            raise UsageError(
                f"the given order of updates does not fit this run: {', '.join(updates)} wait for others; replay it "
                "with the same method, stages, replicas and minibatches"
            )


def is_next(stages: Mapping[int, Stage], action: Action) -> bool:
    """Whether an action may run: any action but an update that is not the stage's next one."""
    agreement = stages[action.stage].agreement
    return action.kind != "U" or agreement is None or agreement.is_next


COMPRESSED: Mapping[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LocalServers(Servers):
    """Servers that hold all shards of all stages in this process."""

    def __init__(self, choice: ParameterServer, replicas: int) -> None:
        super().__init__(choice, replicas)
        self._shards: dict[int, list[Shard]] = {}

    def _open(self, stage: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> None:
        if stage not in self._shards:
            pieces = [[*map(dense, cut.pieces(parameters, shard))] for shard in range(cut.shards)]
            self._shards[stage] = [Shard(parameters_of_shard, self.replicas, build) for parameters_of_shard in pieces]
            self._count(stage)

    def shard(self, stage: int, replica: int) -> Shard:
        return self._shards[stage][replica]

    def push(self, stage: int, replica: int, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        """Only the replica that is next may push, as nothing here can wait."""
        (ticket,) = self.tickets[stage].ask(replica)
        shards = zip(self._shards[stage], gradients, strict=True)
        return ticket.staleness, [shard.update(replica, pieces) for shard, pieces in shards]

    def is_next(self, stage: int, replica: int) -> bool:
        """Whether the next update is this replica's, by the given order or in rotation."""
        return self.tickets[stage].next == replica

    def settle(self, stage: int, replica: int) -> Sequence[Changes]:
        """Tickets begin anew."""
        self.tickets[stage].begin()
        return [shard.changes(replica) for shard in self._shards[stage]]


def dense(piece: Piece) -> Tensor:
    """A piece as a tensor: pieces of parameters, unlike those of gradients, are never sparse."""
    assert isinstance(piece, Tensor), "pieces of parameters are dense"
    return piece


class EmulatedReducer(ReplicaReducer):
    """Replicas call it one after the other; the call of the last one adds up for all, in the order of replicas."""

    def __init__(self, count: int, hook: str | None = None) -> None:
        super().__init__(count)
        self._compressed = COMPRESSED.get(hook)
        self._calls: list[tuple[Sequence[Tensor], Then]] = []

    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        self._meet(tensors, then, None)

    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        self._meet(gradients, then, self._compressed)

    @torch.no_grad()
    def _meet(self, tensors: Sequence[Tensor], then: Then, compressed: torch.dtype | None) -> None:
        self._calls.append((tensors, then))
        if len(self._calls) < self.count:
            return
        calls, self._calls = self._calls, []
        for addends in zip(*(given for given, _ in calls), strict=True):
            total = self._sum(addends, compressed)
            for addend in addends:
                addend.copy_(total)
        for _, afterwards in calls:
            afterwards()

    def _sum(self, addends: Sequence[Tensor], compressed: torch.dtype | None) -> Tensor:
        # torch's compression hooks send each replica's share of the mean.
        sent = addends if compressed is None else [addend.to(compressed).div_(self.count) for addend in addends]
        total = sent[0].clone()
        for addend in sent[1:]:
            total += addend
        return total if compressed is None else total.to(addends[0].dtype) * self.count

    def forget(self) -> None:
        self._calls = []
