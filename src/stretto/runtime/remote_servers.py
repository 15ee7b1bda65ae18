"""A parameter server in the processes of all replicas: each serves a shard of its stages while it trains.

The processes that hold the same stages in all replicas are one another's servers. Of each stage one of them, the
*counter*, gives out the numbers of updates; all servers apply updates in this order, so every shard sends back the
weights right after the update.

    replica          counter          servers of all shards
       | T may I? ------>|
       |<-- G number ----|  (once the others can still stay within the bound)
       | P gradients, number ------------->|
       |<------------- W what has changed -|  (once the numbers before have been applied)

A thread for each other process listens; what it hears is answered at once, under one lock, or kept until it can be. It
never waits for anything but the next message, and what goes wrong in it is raised where this process trains. Between a
flush and the next step nobody listens: D I shall not ask, R I have come so far (all my updates are made; I have all
weights), C what has changed, B goodbye.

A message is a head that says how long the rest is, and the rest:

    head   kind, stage, number, staleness, length of the layout, size in bytes
    rest   the layout's whole numbers, the value's bytes (`serialize.py`)
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.emulate.emulator import dense
from stretto.replicas.parameter_server.client import Changes, Servers
from stretto.replicas.parameter_server.shard import Build, Cut, Piece, Shard
from stretto.replicas.parameter_server.tickets import Ticket
from stretto.replicas.reducer import ReplicaReducer, Then
from stretto.replicas.sync_options import ParameterServer
from stretto.runtime.failure import Failures, PeerLostError, reaching
from stretto.runtime.replica_group import ReplicaGroup
from stretto.runtime.serialize import aligned, layout_of, pack, size_of, unpack

REQUESTS, ANSWERS = "TPC", "GW"
LOOK = 0.5  # seconds after which one who waits looks whether the job has failed
PATIENCE = 5.0  # seconds for listeners to end
HEAD = 6  # whole numbers
TAG = 0x57A1E  # no collective and no channel has it
FOREVER = timedelta(days=1000)  # a listener waits for as long as a script takes between two steps


class Message(NamedTuple):
    """What is said, of which stage; `number` and `staleness` are a ticket's."""

    kind: str
    stage: int = 0
    number: int = 0
    staleness: int = 0
    value: Any = None


class Wire:
    """This process's end. `peer` is the other's rank in the group, `worker` its rank in the job.

    Any thread may send; one listens. What was sent is kept until the protocol says that it has been taken: gloo tells
    only those who wait for it.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, worker: int) -> None:
        self._group, self._peer, self.worker = group, peer, worker
        self._under_way: deque[tuple[str, Any, Tensor]] = deque()
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        layout = layout_of(message.value)
        numbers = torch.tensor(layout, dtype=torch.int64).view(torch.uint8)
        start, size = aligned(len(numbers)), size_of(layout)
        rest = torch.empty(start + size, dtype=torch.uint8)
        rest[: len(numbers)] = numbers
        pack(message.value, rest[start:])
        kind, stage, number, staleness, _ = message
        head = torch.tensor([ord(kind), stage, number, staleness, len(layout), len(rest)])
        with self._lock, reaching(self.worker):
            for buffer in (head, rest):
                work = dist.isend(buffer, group=self._group, group_dst=self._peer, tag=TAG)
                self._under_way.append((kind, work, buffer))

    def taken(self, kinds: str) -> None:
        """The other end has taken the last message of one of these kinds, and so everything before it."""
        with self._lock, reaching(self.worker):
            last = max((place for place, (kind, *_) in enumerate(self._under_way) if kind in kinds), default=-1)
            for _ in range(last + 1):
                self._under_way.popleft()[1].wait()

    def receive(self) -> Message:
        """The next message; waits for it. Raises PeerLostError once the other process has gone."""
        kind, stage, number, staleness, length, size = self._read(torch.empty(HEAD, dtype=torch.int64)).tolist()
        rest = self._read(torch.empty(size, dtype=torch.uint8))
        layout = tuple(rest[: 8 * length].view(torch.int64).tolist())
        return Message(chr(kind), stage, number, staleness, unpack(layout, rest[aligned(8 * length) :]))

    def _read(self, buffer: Tensor) -> Tensor:
        with reaching(self.worker):
            work = dist.irecv(buffer, group=self._group, group_src=self._peer, tag=TAG)
            assert work is not None, "this process is in the group"
            work.wait(FOREVER)
        return buffer


class RemoteServers(Servers):
    """This process's shard of each of its stages, and its way to the others'."""

    def __init__(
        self, choice: ParameterServer, replica_group: ReplicaGroup, failures: Failures, timeout: float
    ) -> None:
        super().__init__(choice, len(replica_group.ranks))
        group, self.ranks, self._status = replica_group
        self.me = dist.get_rank(group)
        self._failures, self._timeout = failures, timeout
        self._wires = {peer: Wire(group, peer, rank) for peer, rank in enumerate(self.ranks) if peer != self.me}
        self._used: dict[int, list[int]] = {}  # of each stage the shards that have something
        self.shards: dict[int, Shard] = {}
        self._early: dict[tuple[int, int], tuple[int, Sequence[Piece]]] = {}  # by stage and number: replica, gradients
        self._heard: dict[tuple[str, int, int], Message] = {}  # by kind, sender, stage or number
        self._changed = threading.Condition()
        self._listeners: list[threading.Thread] = []
        self._settled: dict[int, list[Changes]] = {}
        self.failure: BaseException | None = None

    def _open(self, stage: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> None:
        self._used[stage] = [shard for shard in range(cut.shards) if cut.used[shard]]
        self.shards[stage] = Shard([*map(dense, cut.pieces(parameters, self.me))], self.replicas, build)
        if self.counter(stage) == self.me:
            self._count(stage)

    def shard(self, stage: int, replica: int) -> Shard:
        return self.shards[stage]

    # -- what this replica asks for -----------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._listeners:
            return
        for tickets in self.tickets.values():
            tickets.begin()
        for peer, wire in self._wires.items():
            name = f"stretto-server for worker {wire.worker}"
            self._listeners.append(threading.Thread(target=self._listen, args=(peer,), name=name, daemon=True))
        for listener in self._listeners:
            listener.start()

    def push(self, stage: int, replica: int, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        counter = self.counter(stage)
        self._send(counter, Message("T", stage))
        ticket = self._await("G", counter, stage, f"its turn to update stage {stage}")
        for shard in self._used[stage]:
            self._send(shard, Message("P", stage, ticket.number, value=tuple(gradients[shard])))
        return ticket.staleness, self._changes(stage)

    def _changes(self, stage: int) -> list[Changes]:
        nothing = (None,) * len(self.shards[stage].parameters)
        answers: list[Changes] = [nothing] * self.replicas
        for shard in self._used[stage]:
            answers[shard] = self._await("W", shard, stage, f"weights of stage {stage}").value
        return answers

    def settle(self, stage: int, replica: int) -> Sequence[Changes]:
        """After `leave`; the first stage does it for all."""
        if self._listeners:
            self._meet(1, "its last update")
            for each, used in self._used.items():
                for shard in used:
                    self._send(shard, Message("C", each))
                self._settled[each] = self._changes(each)
            self._meet(2, "its flush")
            self._end()
        return self._settled.pop(stage, [])

    def _meet(self, number: int, what: str) -> None:
        self.tell(Message("R", number))
        for peer in self._wires:
            self._await("R", peer, number, what)

    def _end(self) -> None:
        # Everybody has all answers: a goodbye is the last thing that anybody says.
        self.tell(Message("B"))
        for listener in self._listeners:
            listener.join()
        self._listeners.clear()
        self._raise()
        for wire in self._wires.values():
            wire.taken("B")

    def tell(self, message: Message) -> None:
        for wire in self._wires.values():
            wire.send(message)

    def told(self, peer: int, number: int) -> Any:
        """The losses of that number of another replica; waits for them."""
        return self._await("L", peer, number, "its losses").value

    def leave(self) -> None:
        """Nobody has to wait for an update of this replica."""
        if self._listeners and self.failure is None:
            self.tell(Message("D"))
            with self._changed:
                self._handle(self.me, Message("D"))

    def close(self) -> None:
        if self._listeners:
            with suppress(PeerLostError):
                self.tell(Message("B"))
            until = time.monotonic() + PATIENCE
            for listener in self._listeners:
                listener.join(max(0.0, until - time.monotonic()))
            self._listeners.clear()

    def end_sending(self) -> None:
        """All processes close, and listen until the others have."""
        self.close()

    def end_receiving(self) -> None:
        """Everything has been heard: the last thing that each has said was goodbye."""
        for wire in self._wires.values():
            wire.taken("B")

    def _send(self, to: int, message: Message) -> None:
        if to != self.me:
            self._wires[to].send(message)
            return
        with self._changed:
            self._handle(self.me, message)
            self._changed.notify_all()

    def _await(self, kind: str, sender: int, number: int, what: str) -> Message:
        key, rank = (kind, sender, number), self.ranks[sender]
        until = time.monotonic() + self._timeout
        with self._status.waiting(what, rank), self._changed:
            while key not in self._heard:
                self._raise()
                if not self._changed.wait(LOOK):
                    if self._failures.known():
                        raise PeerLostError(rank, RuntimeError("another worker has failed"))
                    if time.monotonic() > until:
                        raise PeerLostError(rank, TimeoutError(f"timed out after {self._timeout:g} s"))
            return self._heard.pop(key)

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    # -- what others ask for ------------------------------------------------------------------------------------------

    def _listen(self, peer: int) -> None:
        try:
            while (message := self._wires[peer].receive()).kind != "B":
                with self._changed:
                    self._handle(peer, message)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (this process raises it where it trains)
            self._failures.tell(error)
            with self._changed:
                self.failure = self.failure or error
                self._changed.notify_all()

    def _handle(self, sender: int, message: Message) -> None:
        kind, stage, number, _, value = message
        if sender != self.me and kind in REQUESTS + ANSWERS:  # it has taken what came before
            self._wires[sender].taken(ANSWERS if kind in REQUESTS else REQUESTS)
        if kind == "T":
            self._grant(stage, self.tickets[stage].ask(sender))
        elif kind == "D":
            for each, tickets in self.tickets.items():
                self._grant(each, tickets.leave(sender))
        elif kind == "P":
            self._early[stage, number] = sender, value
            self._update(stage)
        elif kind == "C":
            self._answer(sender, Message("W", stage, value=self.shards[stage].changes(sender)))
        else:
            self._heard[kind, sender, number if kind == "L" else stage] = message

    def _grant(self, stage: int, tickets: Sequence[Ticket]) -> None:
        for replica, number, staleness in tickets:
            self._answer(replica, Message("G", stage, number, staleness))

    def _update(self, stage: int) -> None:
        shard = self.shards[stage]
        while (stage, shard.version) in self._early:
            replica, gradients = self._early.pop((stage, shard.version))
            self._answer(replica, Message("W", stage, value=shard.update(replica, gradients)))

    def _answer(self, to: int, message: Message) -> None:
        if to != self.me:
            self._wires[to].send(message)
            return
        # Not the weights themselves: they may change before this replica looks.
        value = None if message.value is None else tuple(map(copied, message.value))
        self._heard[message.kind, self.me, message.stage] = message._replace(value=value)


class Sums(ReplicaReducer):
    """Losses of all replicas, added up in their order; nobody waits for those that `ahead` others have followed."""

    def __init__(self, servers: RemoteServers, ahead: int) -> None:
        super().__init__(servers.replicas)
        self._servers, self._ahead = servers, ahead
        self._begun: deque[tuple[int, Sequence[Tensor], Then]] = deque()
        self._number = 0

    def begin(self) -> None:
        self._servers.begin()

    def leave(self) -> None:
        """Losses of others may come only once they need not wait for updates of this replica."""
        self._servers.leave()

    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        """Tell the others; finish those that nobody may be behind any more."""
        self._servers.tell(Message("L", number=self._number, value=tuple(each.detach().cpu() for each in tensors)))
        self._begun.append((self._number, tensors, then))
        self._number += 1
        while len(self._begun) > self._ahead:
            self._finish_oldest()

    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        raise AssertionError("a parameter server does not add up gradients")

    def finish(self) -> None:
        while self._begun:
            self._finish_oldest()

    @torch.no_grad()
    def _finish_oldest(self) -> None:
        number, tensors, then = self._begun.popleft()
        servers = self._servers
        told = [tensors if r == servers.me else servers.told(r, number) for r in range(self.count)]
        for place, tensor in enumerate(tensors):
            total = told[0][place].cpu().clone()
            for other in told[1:]:
                total += other[place].cpu()
            tensor.copy_(total)
        then()


def copied(piece: Piece) -> Piece:
    return piece.clone() if isinstance(piece, Tensor) else piece
