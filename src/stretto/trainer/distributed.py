"""Several processes, one worker of one replica each; without replicas worker w is the process of rank w."""

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto import checkpoint
from stretto.checkpoint import Manifest
from stretto.collectives import Calibration
from stretto.collectives.reduce import AUTO
from stretto.collectives.stored_calibration import Basis, basis
from stretto.emulate.emulator import EmulatedReducer, LocalServers
from stretto.errors import UsageError
from stretto.mesh import Mesh, Placement
from stretto.nn.batch import call, common_length, inputs_on, to_device
from stretto.nn.buckets import align, tensors_of
from stretto.nn.deferred import RemoteStage
from stretto.nn.devices import pick_device_of, synchronizer
from stretto.nn.shapes import trace
from stretto.nn.sharded_modules import release
from stretto.replicas import AllReduce, Order, ParameterServer, Sync
from stretto.replicas.parameter_server.client import Servers
from stretto.replicas.reducer import ReplicaReducer
from stretto.runtime.channel import Boxes, Channel, ChannelEnd, Inbox, Mailbox, Outbox, channels
from stretto.runtime.failure import PeerLostError, reaching
from stretto.runtime.intra_stage import share_stages
from stretto.runtime.job_member import Member, membership
from stretto.runtime.nccl import Direct, backend_between
from stretto.runtime.remote_servers import RemoteServers, Sums
from stretto.runtime.replica_group import GroupPeers, ReplicaGroup
from stretto.runtime.serialize import as_tensor, as_text
from stretto.runtime.worker import Worker, WorkerRecorder, offset_to_first, tell_time
from stretto.runtime.world import agree, broadcast, compare, machines_of
from stretto.schedule import Rules
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import Stage
from stretto.stage.trainer_arguments import Specification
from stretto.tracing import Recording
from stretto.tracing.recording import worker_name
from stretto.trainer.backend import Backend, InterpreterPlan, Outputs, State, emulates_all

LOGGER = logging.getLogger("stretto")
DEPTH = 4  # values sent outside a schedule that may wait for their receiver
FIRST_TAG = 1  # tag 0 is for messages outside a schedule
REPORT_TAG = 2**20  # beyond those of any schedule
REPORTS = 64  # messages for trackers that may wait to be read


class SeveralProcesses(Backend):
    """A Trainer's backend on several processes. All methods that send messages are collectives."""

    def __init__(self, member: Member, timeout: float, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.member = member
        self.rank, self.size = member.world.rank, member.world.size
        self._placement = Placement(mesh, 1)  # until the number of workers is known
        self._replica_group: ReplicaGroup | None = None
        self.world, self.status = member.world, member.status
        self._groups = member.group_set(self, timeout)
        with member.abort_all_on_error():
            self.group = self._groups.whole()
        member.expect(timeout)
        self._timeout = timeout
        self.cpu = torch.device("cpu")
        self._boxes, self._report_boxes = Boxes(), Boxes()  # by rank
        self._groups.exchanges += [self._boxes, self._report_boxes]
        self._home_of: Mapping[int, int] = {}  # stage -> its worker
        self._sharded = False  # whether each replica keeps only a share of the weights
        self._calibration: Calibration | None = None

    can_retry = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def workers(self, requested: int | None, num_stages: int) -> int:
        """A replica's processes, divided by the number of those that share a stage."""
        processes, replicas = self.size, self._mesh.data
        size = self._mesh.pipeline(processes)
        per_replica = f" for each of {replicas} replicas" if replicas > 1 else ""
        if requested not in (None, size):
            raise UsageError(
                f"workers={requested}, but there are {size} processes{per_replica}: leave workers= out, or start "
                f"{requested * replicas} processes"
            )
        if size > num_stages:
            raise UsageError(
                f"{size} processes for {num_stages} stages{per_replica}: {size - num_stages} would have nothing to do. "
                f"Start {num_stages * replicas} processes at most, or cut the model into {size} stages or more"
            )
        self._placement = Placement(self._mesh, size)
        return size

    def _make_groups(self, device: torch.device) -> None:
        # A group for each worker and its replicas, and one for those that share its stages; all processes make all.
        places = itertools.product(range(self._placement.workers), range(self._mesh.inside))
        for worker, part in places if self._mesh.data > 1 else ():
            ranks = self._placement.replicas_of(worker, part)
            group = self._groups.group(ranks)
            if group is not None:
                self._replica_group = ReplicaGroup(group, ranks, self.status)
        self.sharing = share_stages(self._placement, self.rank, device, self._groups.group)

    @property
    def _worker(self) -> int:
        return self._placement.at(self.rank)[1]

    @property
    def _part(self) -> int:
        return self._placement.part(self.rank)

    @property
    def _ranks(self) -> list[int]:
        # The ranks of this replica's workers; of the processes that share a worker's stages, the one with this part.
        return self._placement.workers_of(self.replicas[0], self._part)

    @property
    def replicas(self) -> Sequence[int]:
        return (self._placement.at(self.rank)[0],)

    def holds(self, worker: int) -> bool:
        return worker == self._worker

    def share(self, modules: Sequence[nn.Module | None]) -> None:
        if self._replica_group is not None:
            group, ranks, _ = self._replica_group
            with reaching(ranks[0] if self.rank != ranks[0] else ranks[1]):
                align(tensors_of(modules), group)

    def shard(
        self, stages: Sequence[nn.Module], heads: Sequence[nn.Module | None], sync: Sync, device: torch.device
    ) -> None:
        if self._replica_group is not None and sync.sharding is not None:
            from stretto.runtime.fsdp import shard  # slow to import

            self._sharded = True
            for module, sums_once in (*((stage, True) for stage in stages), *((head, False) for head in heads)):
                if module is not None and any(True for _ in module.parameters()):
                    shard(module, self._replica_group, sync.sharding, device, sums_once=sums_once)

    def reducer(self, sync: Sync) -> ReplicaReducer | Servers:
        """Parameter servers, or a reducer, over the processes that hold the same stages."""
        if sync.serving is not None:
            self._servers = self._servers or self._serve(sync.serving)
            return self._servers
        if self._replica_group is None:
            return EmulatedReducer(1)
        return GroupPeers(self._replica_group, sync, self._calibration)

    def _serve(self, sync: ParameterServer) -> LocalServers | RemoteServers:
        if self._replica_group is None:
            return LocalServers(sync, 1)
        servers = RemoteServers(sync, self._replica_group, self.member.failures, self._timeout)
        self.member.services.add(servers)
        self._groups.exchanges.insert(0, servers)  # what they wait for may need the others
        return servers

    def order(self) -> Order | None:
        if self._servers is None:
            return None
        orders = self.collect(as_tensor(json.dumps(self._servers.order().to_json()).encode()))
        return Order.join(Order.of_json(json.loads(as_text(order))) for order in orders) if self.is_first else None

    def _loss_reducer(self) -> ReplicaReducer | None:
        if self._replica_group is None:
            return None
        if isinstance(self._servers, RemoteServers):
            return Sums(self._servers, self._servers.choice.lag(self._mesh.data))
        return GroupPeers(self._replica_group, AllReduce())

    def device(self, requested: str | torch.device) -> torch.device:
        return pick_device_of(requested, self.world.local_rank)

    def interpreters(
        self, plans: Sequence[InterpreterPlan], replicas: Sequence[Mapping[int, Stage]], lag: int, device: torch.device
    ) -> list[Interpreter]:
        self._home_of = plans[0].schedule.worker_of
        used = dict(reduce(or_, (Counter(channels(plan.schedule, plan.rules, lag)) for plan in plans)))
        mailbox = Mailbox(
            self.group,
            used,
            self._home_of,
            device,
            ranks=self._ranks,
            first_tag=FIRST_TAG,
            status=self.status,
            direct=self._direct(used, device),
        )
        self._groups.exchanges.append(mailbox)
        loss_reducer = self._loss_reducer()
        self._interpreters = [
            Worker(
                plan.schedule,
                plan.rules,
                replicas[0],
                plan.delays,
                worker=self._worker,
                mailbox=mailbox,
                lag=lag,
                status=self.status,
                peers=loss_reducer,
                within=self.sharing,
            )
            for plan in plans
        ]
        return self._interpreters

    def _direct(self, used: Iterable[Channel], device: torch.device) -> dict[Channel, Direct]:
        # Losses go to all processes, a few bytes each: they go through the host.
        backend = backend_between(self.group, device)
        connections: dict[Channel, Direct] = {}
        if backend is not None:
            for channel in sorted(channel for channel in used if channel.value != "loss"):
                for replica, part in itertools.product(range(self._mesh.data), range(self._mesh.inside)):
                    ranks = self._placement.workers_of(replica, part)
                    ends = ranks[self._home_of[channel.stage]], ranks[channel.worker]
                    group = self._groups.group(ends, backend)
                    if group is not None:
                        connections[channel] = Direct(group, device)
        return connections

    def record(self, device: torch.device) -> list[Recording]:
        workers = [worker for worker in self._interpreters if isinstance(worker, Worker)]
        name = worker_name(self._worker, workers[0].schedule)
        place = f"replica {self.replicas[0]}, " if self._mesh.data > 1 else ""
        place += "".join(f"{axis} {at}, " for axis, at in self._placement.place(self.rank).items())
        recording = Recording(self.rank, name=place + name)
        if self.is_first:
            for rank in range(1, self.size):
                tell_time(self._to(rank), self._from(rank, self.cpu))
        else:
            recording.offset = offset_to_first(self._to(0), self._from(0, self.cpu))
        for worker in workers:
            worker.record = WorkerRecorder(worker, recording, synchronizer(device))
            worker.recording = recording
        return [recording]

    @contextmanager
    def _meeting(self, root: int | None = None) -> Iterator[None]:
        # While it lasts this process waits for the others in a collective. In a broadcast from a `root` all others wait
        # for that one alone, and some may have got theirs and left while others are not there yet.
        others = [rank for rank in range(self.size) if rank != self.rank]
        if root not in (None, self.rank):
            others = [root]
        worker = others[self.rank % len(others)]
        with self.status.waiting("its part in a collective", worker, others, every=root is not None), reaching(worker):
            yield

    def agree(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Compare what all processes are about to train, then make the groups of replicas and of shared stages."""
        with self._meeting():
            agree(self.group, description)
            self._make_groups(device)

    def compare(self, description: Mapping[str, Any], what: str, remedy: str) -> None:
        with self._meeting():
            compare(self.group, description, what, remedy)

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        largest = torch.tensor(values, dtype=torch.float64)
        with self._meeting():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in largest]

    def broadcast(self, value: Any) -> Any:
        text = json.dumps(value if self.rank == 0 else None)
        with self._meeting(0):
            return json.loads(broadcast(self.group, text.encode()))

    def calibrate(self, sync: Sync) -> None:
        """Give all processes rank 0's calibration: with different tables they would choose different algorithms."""
        reducing = sync.reducing
        if self._replica_group is None or reducing is None or reducing.algorithm != AUTO:
            return
        message: dict[str, Any] = {}
        if self.is_first:
            ranks = self._replica_group.ranks
            try:
                message = basis(len(ranks), machines_of(ranks), reducing.calibration).to_json()
            except UsageError as error:
                message = {"error": str(error)}
        message = self.broadcast(message)
        if "error" in message:
            raise UsageError(f"{sync}: {message['error']}")
        chosen = Basis.of_json(message)
        self._calibration = chosen.calibration
        if self.is_first:
            level = logging.WARNING if chosen.calibration is None else logging.INFO
            LOGGER.log(level, "%s goes by %s", sync, chosen.words)

    def trace(self, stages: Sequence[nn.Module], example: Any, device: torch.device, *, any_output: bool) -> Outputs:
        """Run each stage in its own process, which then sends its outputs to the others."""
        homes = self._homes(stages)
        outputs: Outputs = []
        given: tuple[Tensor, ...] = inputs_on(example, device) if homes[0] == self.rank else ()
        whole: tuple[Tensor, ...] = ()
        for index, home in enumerate(homes):
            before = homes[index - 1] if index else home
            if before != home and self.rank == before:
                self._to(home).send(given)
            if home == self.rank:
                if before != home:
                    given = self._from(before, device).receive().value
                is_last = index == len(stages) - 1
                with self.sharing.working():
                    given = trace([stages[index]], given, device, first=index, any_output=any_output and is_last)[0]
                    whole = given if is_last else self.sharing.whole(given)
            outputs.append(self._outputs_of(home, whole, device))
        self._settle()
        return outputs

    def refresh(self, stages: Mapping[int, Stage], rules: Rules) -> None:
        for tie in (tie for tie in rules.ties if tie.shares):
            if tie.owner in stages and tie.user not in stages:
                self._to(self._ranks[self._home_of[tie.user]]).send(stages[tie.owner].lent(tie.user))
            elif tie.user in stages and tie.owner not in stages:
                stages[tie.user].take_over(self._from(self._ranks[self._home_of[tie.owner]], self.cpu).receive().value)

    def _sums_of_last(self, stages: Sequence[nn.Module], sums: list[float]) -> list[float]:
        last = self._last_home(stages)
        shared = torch.tensor(sums, dtype=torch.float64)
        self._settle()  # the broadcast below does not wait for messages in other replicas and parts
        with self._meeting(last):
            dist.broadcast(shared, group_src=last, group=self.group)
        return shared.tolist()

    def predict(
        self, stages: Sequence[nn.Module], specification: Specification, batches: Iterable[Any]
    ) -> list[Any] | None:
        last, me = self._last_home(stages), self.rank
        outputs: list[Any] = []

        def keep(output: Any, _: int) -> None:
            if me == last:
                outputs.append(to_device(specification.precision.outputs(output), self.cpu))

        with self._evaluating(stages):
            for x in self._read_here(batches):
                self._forward(stages, specification, x, keep)
                if last != 0 and me == last:
                    self._to(0).send(*_as_message(outputs.pop()))
                elif last != 0 and me == 0:
                    single, output = self._from(last, specification.device).receive()
                    output = tuple([part.cpu().clone() for part in output])  # each in memory of its own
                    outputs.append(output[0] if single else output)
        self._settle()
        return outputs if me == 0 else None

    def _last_home(self, stages: Sequence[nn.Module]) -> int:
        # The rank of replica 0 whose last stage's outputs count.
        return self._placement.rank(0, self._home_of[len(stages) - 1])

    def _read_here(self, batches: Iterable[Any]) -> Iterator[Any]:
        # Of replicas the first one runs them, or all where none has whole weights without the others.
        for batch in batches:  # draws as many random numbers as in replica 0
            if not self.replicas[0] or self._sharded:
                yield batch

    @contextmanager
    def _evaluating(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        here = [stage for stage in stages if not isinstance(stage, RemoteStage)]
        with super()._evaluating(here):
            yield
        for stage in here:
            release(stage)

    def _forward(
        self, stages: Sequence[nn.Module], specification: Specification, x: Any, use: Callable[[Any, int], None]
    ) -> None:
        # Each stage in its process.
        homes, me, device = self._homes(stages), self.rank, specification.device
        given: tuple[Any, ...] = ()
        examples = 0
        if homes[0] == me:
            given = specification.precision.inputs(inputs_on(x, device))
            examples = common_length(given)
        for index, home in enumerate(homes):
            before = homes[index - 1] if index else home
            if before != home and before == me:
                self._to(home).send(given, examples)
            if home == me:
                if before != home:
                    examples, given = self._from(before, device).receive()
                with specification.precision.forward(device), self.sharing.working():
                    output = call(stages[index], given)
                    given = output if isinstance(output, tuple) else (output,)
                    if index == len(stages) - 1:
                        use(output, examples)

    @property
    def writes(self) -> bool:
        return self.replicas[0] == 0 and self._part == 0

    def gather(self, states: Mapping[int, State]) -> dict[int, State] | None:
        """Send replica 0's states to rank 0: for each stage its names, as bytes of text, then its tensors."""
        if not self.writes:
            return None
        if not self.is_first:
            out = self._to(0)
            out.send(torch.tensor(len(states)))
            for stage, state in states.items():
                names = "\n".join(state).encode()
                out.send(as_tensor(names) if names else None, stage)
                for tensor in state.values():
                    out.send(tensor.detach())
            out.settle()
            return None
        gathered = dict(states)
        for rank in self._ranks[1:]:
            inbox = self._from(rank, self.cpu)
            for _ in range(int(inbox.receive().value)):
                stage, names = inbox.receive()
                keys = [] if names is None else as_text(names).decode().split("\n")
                gathered[stage] = {key: inbox.receive().value.clone() for key in keys}
        return dict(sorted(gathered.items()))

    def save(
        self, path: str | os.PathLike[str], replicas: Sequence[Mapping[int, Mapping[str, Any]]], manifest: Manifest
    ) -> None:
        """Each process writes its own stages, or its part of them; of several with the same part, the first.

        Other replicas write only what differs from replica 0. Rank 0 completes the checkpoint.
        """
        if self.is_first:
            checkpoint.begin(path)
        self.barrier()
        (states,) = replicas
        partial, written = checkpoint.partial_of(path), {}
        if self.sharing.writes:
            contents = self._contents_of_first(states)
            for index, state in states.items():
                known = contents.get(index) if self.replicas[0] else None
                written[index] = checkpoint.write_stage(partial, index, state, replica=self.replicas[0], first=known)
        digests: dict[int, dict[str, Any]] = {}
        for message in self.collect(as_tensor(json.dumps(written).encode())):
            for stage, files in json.loads(as_text(message)).items():
                digests.setdefault(int(stage), {}).update(files)
        if self.is_first:
            checkpoint.finish(partial, path, replace(manifest, stages=[digests[index] for index in sorted(digests)]))
        self.barrier()

    def _contents_of_first(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, checkpoint.Contents]:
        # Replica 0 sends the contents of its stages to its copies in other replicas.
        if self._replica_group is None:
            return {}
        first, *others = self._replica_group.ranks
        if self.rank != first:
            received = json.loads(as_text(self._from(first, self.cpu).receive().value))
            return {int(index): contents for index, contents in received.items()}
        own = {index: checkpoint.contents(index, state) for index, state in states.items()}
        for rank in others:
            self._to(rank).send(as_tensor(json.dumps(own).encode()))
        self._settle()
        return own

    def report(self, message: Tensor) -> None:
        """Through a channel of its own: rank 0 reads it later, between other messages."""
        inboxes, outboxes = self._report_boxes.inboxes, self._report_boxes.outboxes
        if self.is_first:
            self._reports.append(message)
            for rank in range(1, self.size) if not inboxes else ():
                inboxes[rank] = Inbox(self._report_line(rank), self.cpu)
            return
        if not outboxes:
            outboxes[0] = Outbox(self._report_line(0), REPORTS)
        outboxes[0].send(message)

    def reports(self) -> list[Tensor]:
        others = self._report_boxes.inboxes.values()
        return [self._reports.popleft(), *(inbox.receive().value.clone() for inbox in others)]

    def _report_line(self, rank: int) -> ChannelEnd:
        return ChannelEnd(self.group, rank, REPORT_TAG, "a report for the trackers", self.status)

    def collect(self, message: Tensor) -> list[Tensor]:
        if not self.is_first:
            self._to(0).send(message)
            self._settle()
            return []
        return [message, *(self._from(rank, self.cpu).receive().value for rank in range(1, self.size))]

    def close(self) -> None:
        """Say the last words by all groups, and leave them to another Trainer; a collective."""
        if not self.member.failed:
            with self.member.abort_all_on_error():
                self._groups.end()
        self.give_up()

    def give_up(self) -> None:
        self._groups.user = None
        super().give_up()

    def _abort_all_on_error(self) -> AbstractContextManager[None]:
        return self._served() if isinstance(self._servers, RemoteServers) else self.member.abort_all_on_error()

    @contextmanager
    def _served(self) -> Iterator[None]:
        # If this process's server has failed, that is why other processes are lost.
        with self.member.abort_all_on_error():
            try:
                yield
            except PeerLostError:
                if isinstance(self._servers, RemoteServers) and self._servers.failure is not None:
                    raise self._servers.failure from None
                raise

    def new_request(self) -> str:
        """Counted over all trainers of this process, since they share the store."""
        self.member.requests += 1
        return f"last step {self.member.requests}"

    def should_stop(self, step: int, ahead: int, wanted: bool, request: str = "last step") -> bool:
        """The first process that wants to stop stores a step that none has reached; the others read it: some 0.1 ms."""
        store = self.world.store
        if store is None:
            return False
        if wanted:
            store.compare_set(request, "", str(step + 2 * ahead + 2))
        return store.check([request]) and step >= int(store.get(request))

    def barrier(self) -> None:
        with self._meeting():
            dist.barrier(group=self.group)

    def _homes(self, stages: Sequence[nn.Module]) -> list[int]:
        # The process of this replica that holds each stage.
        return [self._ranks[stage.worker] if isinstance(stage, RemoteStage) else self.rank for stage in stages]

    def _outputs_of(self, home: int, outputs: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        # Every process of the replica gets the outputs of the stage at rank `home`.
        if home == self.rank:
            for other in self._ranks:
                if other != home:
                    self._to(other).send(outputs)
            return outputs
        value: tuple[Tensor, ...] = self._from(home, device).receive().value
        return value

    def _settle(self) -> None:
        # Wait until all messages are received: the rest would be lost if this trainer is given up.
        self._boxes.settle()

    def _to(self, rank: int) -> Outbox:
        if rank not in self._boxes.outboxes:
            self._boxes.outboxes[rank] = Outbox(self._line(rank), DEPTH)
        return self._boxes.outboxes[rank]

    def _from(self, rank: int, device: torch.device) -> Inbox:
        if rank not in self._boxes.inboxes:
            self._boxes.inboxes[rank] = Inbox(self._line(rank), device)
        return self._boxes.inboxes[rank]

    def _line(self, rank: int) -> ChannelEnd:
        return ChannelEnd(self.group, rank, 0, "a message", self.status, rare=True)


def _as_message(output: Any) -> tuple[tuple[Tensor, ...], int]:
    """The tensors of an output, and 1 if it is one tensor, 0 if it is a tuple. Raises UsageError for anything else."""
    tensors = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise UsageError(
            f"predict: the model's output is a {type(output).__name__}: between processes a tensor, or a tuple of "
            "them, can be sent; predict on one process, or have the last stage return tensors"
        )
    return tensors, int(isinstance(output, Tensor))


def find_backend(timeout: float, mesh: Mesh) -> Backend:
    """The backend of this process alone, or of all that a launcher started; waits for others end after `timeout` s."""
    member = None if emulates_all() else membership(timeout)
    return Backend(mesh) if member is None else SeveralProcesses(member, timeout, mesh)
