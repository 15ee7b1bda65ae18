"""Several processes, one worker of one replica each; without replicas worker w is the process of rank w."""

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, replace
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
from stretto.emulate.local_servers import LocalServers
from stretto.emulate.meeting import EmulatedReducer
from stretto.errors import UsageError
from stretto.mesh import Mesh, Placement
from stretto.nn.batch import call, inputs_on, target_on
from stretto.nn.buckets import align, tensors_of
from stretto.nn.devices import pick_device_of, synchronizer
from stretto.nn.preserve import evaluating
from stretto.nn.remote_stage import RemoteStage
from stretto.nn.shapes import trace
from stretto.nn.sharded_modules import release
from stretto.replicas import AllReduce, Order, ParameterServer, Sync
from stretto.replicas.parameter_server.servers import Servers
from stretto.replicas.reduction import ReplicaReducer
from stretto.runtime.channel import ChannelEnd, Inbox, Outbox
from stretto.runtime.channels import Channel, Mailbox, channels
from stretto.runtime.failure import PeerLostError, reaching
from stretto.runtime.nccl import Direct, backend_between
from stretto.runtime.process import Member
from stretto.runtime.recorder import WorkerRecorder, offset_to_first, tell_time
from stretto.runtime.remote_servers import RemoteServers, Sums
from stretto.runtime.replica_group import GroupPeers, ReplicaGroup
from stretto.runtime.serialize import as_tensor, as_text
from stretto.runtime.shared_worker import share_stages
from stretto.runtime.worker import Worker
from stretto.runtime.world import agree, group_of, machines_of, told_by_first
from stretto.schedule import Rules
from stretto.stage.interpreter import Interpreter
from stretto.stage.shared_stage import StageSharing
from stretto.stage.specification import Specification
from stretto.stage.stage import Stage
from stretto.tracing import Recording
from stretto.tracing.naming import worker_name
from stretto.trainer.backend import Backend, InterpreterPlan, Outputs, State
from stretto.trainer.evaluate import Tally

LOGGER = logging.getLogger("stretto")
DEPTH = 4  # values that may wait outside a schedule
FIRST_TAG = 1  # 0 is for what workers say outside a schedule


class SeveralProcesses(Backend):
    """What a Trainer does otherwise on several processes. Everything here is a collective, but what asks no one."""

    def __init__(self, member: Member, timeout: float, mesh: Mesh) -> None:
        self.member = member
        self._mesh = mesh
        self.within = StageSharing()
        self._placement = Placement(mesh, 1)  # until it is known how many workers there are
        self._fellowship: ReplicaGroup | None = None
        self._servers: LocalServers | RemoteServers | None = None
        self.world, self.status = member.world, member.status
        self.group = member.group(timeout)
        member.expect(timeout)
        self._timeout = timeout
        self.cpu = torch.device("cpu")
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._home_of: Mapping[int, int] = {}  # the worker of each stage
        self._sharded = False  # whether replicas have shares of the weights
        self._calibration: Calibration | None = None

    can_retry = False

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The world's."""
        return self.world.size

    @property
    def is_first(self) -> bool:
        """Rank 0."""
        return self.world.rank == 0

    def workers(self, asked: int | None, num_stages: int) -> int:
        """One for each process of a replica."""
        processes, replicas = self.world.size, self._mesh.data
        size = self._mesh.pipeline(processes)
        each = f" for each of {replicas} replicas" if replicas > 1 else ""
        if asked not in (None, size):
            raise UsageError(
                f"workers={asked}, but there are {size} processes{each}: leave workers= out, or start "
                f"{asked * replicas} processes"
            )
        if size > num_stages:
            raise UsageError(
                f"{size} processes for {num_stages} stages{each}: {size - num_stages} would have nothing to do. Start "
                f"{num_stages * replicas} processes at most, or cut the model into {size} stages or more"
            )
        self._placement = Placement(self._mesh, size)
        return size

    def _meet(self, device: torch.device) -> None:
        # A group for each worker and its copies, one for those that share its stages; all processes make all of them.
        places = itertools.product(range(self._placement.workers), range(self._mesh.inside))
        for worker, part in places if self._mesh.data > 1 else ():
            ranks = self._placement.replicas_of(worker, part)
            group = group_of(ranks, self._timeout)
            if group is not None:
                self._fellowship = ReplicaGroup(group, ranks, self.status)
        self.within = share_stages(self._placement, self.rank, device, self._timeout)

    @property
    def _worker(self) -> int:
        return self._placement.at(self.rank)[1]

    @property
    def _part(self) -> int:
        return self._placement.part(self.rank)

    @property
    def _ranks(self) -> list[int]:
        # The processes of this replica, in the order of workers; of those that share stages, the same one of each.
        return self._placement.workers_of(self.replicas[0], self._part)

    @property
    def replicas(self) -> Sequence[int]:
        """One."""
        return (self._placement.at(self.rank)[0],)

    def holds(self, worker: int) -> bool:
        """Whether it is this process."""
        return worker == self._worker

    def share(self, modules: Sequence[nn.Module | None]) -> None:
        """Replica 0 tells the others."""
        if self._fellowship is not None:
            group, ranks, _ = self._fellowship
            with reaching(ranks[0] if self.rank != ranks[0] else ranks[1]):
                align(tensors_of(modules), group)

    def shard(self, modules: Sequence[nn.Module | None], sync: Sync, device: torch.device) -> None:
        """Each module by itself."""
        if self._fellowship is not None and sync.sharding is not None:
            from stretto.runtime.fsdp import shard  # it takes a while

            self._sharded = True
            for module in modules:
                if module is not None and any(True for _ in module.parameters()):
                    shard(module, self._fellowship, sync.sharding, device)

    def peers(self, sync: Sync) -> ReplicaReducer | Servers:
        """The processes that hold the same stages."""
        if sync.serving is not None:
            self._servers = self._servers or self._serve(sync.serving)
            return self._servers
        return EmulatedReducer(1) if self._fellowship is None else GroupPeers(self._fellowship, sync, self._calibration)

    def _serve(self, sync: ParameterServer) -> LocalServers | RemoteServers:
        if self._fellowship is None:
            return LocalServers(sync, 1)
        servers = RemoteServers(sync, self._fellowship, self.member.failures, self._timeout)
        self.member.services.add(servers)
        return servers

    def order(self) -> Order | None:
        """What each has counted, put together on the first."""
        if self._servers is None:
            return None
        told = self._collect(as_tensor(json.dumps(self._servers.order().to_json()).encode()))
        return Order.join(Order.of_json(json.loads(as_text(one))) for one in told) if self.is_first else None

    def _sums(self) -> ReplicaReducer | None:
        if self._fellowship is None:
            return None
        if isinstance(self._servers, RemoteServers):
            return Sums(self._servers, self._servers.choice.lag(self._mesh.data))
        return GroupPeers(self._fellowship, AllReduce())

    def device(self, asked: str | torch.device) -> torch.device:
        """A device of its own for each process of a machine, unless one is asked for by its number."""
        return pick_device_of(asked, self.world.local_rank)

    def interpreters(
        self, plans: Sequence[InterpreterPlan], replicas: Sequence[Mapping[int, Stage]], lag: int, device: torch.device
    ) -> list[Interpreter]:
        """Workers that share one mailbox."""
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
        sums = self._sums()
        return [
            Worker(
                plan.schedule,
                plan.rules,
                replicas[0],
                plan.delays,
                worker=self._worker,
                mailbox=mailbox,
                lag=lag,
                status=self.status,
                peers=sums,
                within=self.within,
            )
            for plan in plans
        ]

    def _direct(self, used: Iterable[Channel], device: torch.device) -> dict[Channel, Direct]:
        # Losses go to everybody, each a few bytes: they pass the host.
        backend = backend_between(self.group, device)
        made: dict[Channel, Direct] = {}
        if backend is not None:
            for channel in sorted(channel for channel in used if channel.value != "loss"):
                for replica, part in itertools.product(range(self._mesh.data), range(self._mesh.inside)):
                    ranks = self._placement.workers_of(replica, part)
                    ends = ranks[self._home_of[channel.stage]], ranks[channel.worker]
                    group = group_of(ends, self._timeout, backend)
                    if group is not None:
                        made[channel] = Direct(group, device)
        return made

    def record(self, interpreters: Sequence[Interpreter], device: torch.device) -> list[Recording]:
        """One recording: that of this worker."""
        workers = [each for each in interpreters if isinstance(each, Worker)]
        name = worker_name(self._worker, workers[0].schedule)
        of = f"replica {self.replicas[0]}, " if self._mesh.data > 1 else ""
        of += "".join(f"{axis} {at}, " for axis, at in self._placement.place(self.rank).items())
        recording = Recording(self.world.rank, name=of + name)
        if self.is_first:
            for rank in range(1, self.world.size):
                tell_time(self._to(rank), self._from(rank, self.cpu))
        else:
            recording.offset = offset_to_first(self._to(0), self._from(0, self.cpu))
        for worker in workers:
            worker.record = WorkerRecorder(worker, recording, synchronizer(device))
            worker.recording = recording
        return [recording]

    def agree(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Compare what all are about to train; then those who share something meet."""
        with reaching((self.rank + 1) % self.size):
            agree(self.group, description)
            self._meet(device)

    def calibrate(self, sync: Sync) -> None:
        """What the first process finds counts for all: with other tables they would choose other algorithms."""
        reducing = sync.reducing
        if self._fellowship is None or reducing is None or reducing.algorithm != AUTO:
            return
        mine: dict[str, Any] = {}
        if self.is_first:
            ranks = self._fellowship.ranks
            try:
                mine = basis(len(ranks), machines_of(ranks), reducing.calibration).to_json()
            except UsageError as error:
                mine = {"error": str(error)}
        with reaching(0 if self.rank else 1):
            told = json.loads(told_by_first(self.group, json.dumps(mine).encode()))
        if "error" in told:
            raise UsageError(f"{sync}: {told['error']}")
        found = Basis.of_json(told)
        self._calibration = found.calibration
        if self.is_first:
            level = logging.WARNING if found.calibration is None else logging.INFO
            LOGGER.log(level, "%s goes by %s", sync, found.words)

    def trace(self, stages: Sequence[nn.Module], example: Any, device: torch.device) -> Outputs:
        """Each stage where it lives; then everybody is told the shapes."""
        homes = self._homes(stages)
        outputs: Outputs = []
        given: tuple[Tensor, ...] = inputs_on(example, device) if homes[0] == self.world.rank else ()
        whole: tuple[Tensor, ...] = ()
        for index, home in enumerate(homes):
            before = homes[index - 1] if index else home
            if before != home and self.world.rank == before:
                self._to(home).send(given)
            if home == self.world.rank:
                if before != home:
                    given = self._from(before, device).receive().value
                with self.within.working():
                    given = trace([stages[index]], given, device, first=index)[0]
                    whole = given if index == len(stages) - 1 else self.within.whole(given)
            outputs.append(self._shapes(whole, home, device))
        self._settle()
        return outputs

    def refresh(self, stages: Mapping[int, Stage], rules: Rules) -> None:
        """The owner sends, the borrower overwrites what it has."""
        for tie in (each for each in rules.ties if each.shares):
            if tie.owner in stages and tie.user not in stages:
                self._to(self._ranks[self._home_of[tie.user]]).send(stages[tie.owner].lent())
            elif tie.user in stages and tie.owner not in stages:
                stages[tie.user].take_over(self._from(self._ranks[self._home_of[tie.owner]], self.cpu).receive().value)

    def evaluate(
        self, stages: Sequence[nn.Module], of: Specification, batches: Iterable[tuple[Any, Any]]
    ) -> dict[str, float]:
        """Batch after batch through the stages of replica 0, where they live; the last one counts.

        Replicas that share out their weights all do it: none can without the others.
        """
        homes, me = self._homes(stages), self.world.rank
        told = self._placement.rank(0, self._home_of[len(stages) - 1])  # whom to ask
        device, precision, tally = of.device, of.precision, Tally()
        here = [stage for stage in stages if not isinstance(stage, RemoteStage)]
        if self.replicas[0] > 0 and not self._sharded:
            for _ in batches:  # whoever made them may draw from the same source again
                pass
            batches = ()
        with evaluating(here), torch.no_grad():
            for x, y in batches:
                given: tuple[Any, ...] = ()
                examples = 0
                if homes[0] == me:
                    given = precision.inputs(inputs_on(x, device))
                    examples = given[0].shape[0]
                for index, home in enumerate(homes):
                    before = homes[index - 1] if index else home
                    if before != home and before == me:
                        self._to(home).send(given, examples)
                    if home == me:
                        if before != home:
                            examples, given = self._from(before, device).receive()
                        with precision.forward(device), self.within.working():
                            output = call(stages[index], given)
                            given = output if isinstance(output, tuple) else (output,)
                            if index == len(stages) - 1:
                                target = target_on(y, device)
                                tally.add(output, target, precision.loss(of.loss), examples)
        sums = torch.tensor([*astuple(tally)], dtype=torch.float64)
        for stage in here:
            release(stage)
        self._settle()  # what another replica, or another part of it, has sent is not part of the answer
        with reaching(told if told != me else (me + 1) % self.size):
            dist.broadcast(sums, group_src=told, group=self.group)
        total, weight, *counts = sums.tolist()
        return Tally(total, weight, *map(int, counts)).result()

    def gather(self, own: Mapping[int, State]) -> dict[int, State] | None:
        """Names as text in bytes, then tensor after tensor. Those of replica 0."""
        if self.replicas[0] > 0 or self._part > 0:
            return None
        if not self.is_first:
            out = self._to(0)
            out.send(torch.tensor(len(own)))
            for stage, state in own.items():
                names = "\n".join(state).encode()
                out.send(as_tensor(names) if names else None, stage)
                for tensor in state.values():
                    out.send(tensor.detach())
            out.settle()
            return None
        gathered = dict(own)
        for rank in self._ranks[1:]:
            box = self._from(rank, self.cpu)
            for _ in range(int(box.receive().value)):
                stage, names = box.receive()
                keys = [] if names is None else as_text(names).decode().split("\n")
                gathered[stage] = {key: box.receive().value.clone() for key in keys}
        return dict(sorted(gathered.items()))

    def save(
        self, path: str | os.PathLike[str], replicas: Sequence[Mapping[int, Mapping[str, Any]]], manifest: Manifest
    ) -> None:
        """Each process writes its own stages, or its part of them, the first of several that have the same part.

        Of what is the same in all replicas replica 0 writes all. Rank 0 makes a checkpoint of it.
        """
        if self.is_first:
            checkpoint.begin(path)
        self.barrier()
        (states,) = replicas
        partial, mine = checkpoint.partial_of(path), {}
        if self.within.writes:
            first = self._contents_of_first(states)
            for index, state in states.items():
                known = first.get(index) if self.replicas[0] else None
                mine[index] = checkpoint.write_stage(partial, index, state, replica=self.replicas[0], first=known)
        digests: dict[int, dict[str, Any]] = {}
        for one in self._collect(as_tensor(json.dumps(mine).encode())):
            for stage, files in json.loads(as_text(one)).items():
                digests.setdefault(int(stage), {}).update(files)
        if self.is_first:
            checkpoint.finish(partial, path, replace(manifest, stages=[digests[index] for index in sorted(digests)]))
        self.barrier()

    def _contents_of_first(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, checkpoint.Contents]:
        # Replica 0 tells its copies what its stages consist of.
        if self._fellowship is None:
            return {}
        first, *others = self._fellowship.ranks
        if self.rank != first:
            told = json.loads(as_text(self._from(first, self.cpu).receive().value))
            return {int(index): each for index, each in told.items()}
        found = {index: checkpoint.contents(index, state) for index, state in states.items()}
        for rank in others:
            self._to(rank).send(as_tensor(json.dumps(found).encode()))
        self._settle()
        return found

    def _collect(self, mine: Tensor) -> list[Tensor]:
        # What every process has, on the first one.
        if not self.is_first:
            self._to(0).send(mine)
            self._settle()
            return []
        return [mine, *(self._from(rank, self.cpu).receive().value for rank in range(1, self.world.size))]

    def together(self) -> AbstractContextManager[None]:
        """An error here ends all processes: it is said once, by the process where it happened."""
        return self._served_together() if isinstance(self._servers, RemoteServers) else self.member.together()

    @contextmanager
    def _served_together(self) -> Iterator[None]:
        # Where a server has failed here, others have gone because of that.
        with self.member.together():
            try:
                yield
            except PeerLostError:
                if isinstance(self._servers, RemoteServers) and self._servers.failure is not None:
                    raise self._servers.failure from None
                raise

    def last_step(self, step: int, ahead: int, wanted: bool) -> int | None:
        """Whoever wants it first names a step that nobody has reached; the others find it in the store."""
        store = self.world.store
        if store is None:
            return None
        if wanted:
            store.compare_set("last step", "", str(step + 2 * ahead + 2))
        return int(store.get("last step")) if store.check(["last step"]) else None

    def barrier(self) -> None:
        """Wait for all."""
        with reaching((self.rank + 1) % self.size):
            dist.barrier(group=self.group)

    def _homes(self, stages: Sequence[nn.Module]) -> list[int]:
        # The process of this replica that holds each stage.
        return [self._ranks[stage.worker] if isinstance(stage, RemoteStage) else self.world.rank for stage in stages]

    def _shapes(self, outputs: tuple[Tensor, ...], home: int, device: torch.device) -> tuple[Tensor, ...]:
        # Everybody hears what the stage at `home` gives for an example; the numbers stay there.
        if home == self.world.rank:
            for other in self._ranks:
                if other != home:
                    self._to(other).send(outputs)
            return outputs
        value: tuple[Tensor, ...] = self._from(home, device).receive().value
        return value

    def _settle(self) -> None:
        # A message that has not been taken is lost if this trainer is given up.
        for box in self._outboxes.values():
            box.settle()

    def _to(self, rank: int) -> Outbox:
        if rank not in self._outboxes:
            self._outboxes[rank] = Outbox(ChannelEnd(self.group, rank, 0, "what it has", self.status), DEPTH)
        return self._outboxes[rank]

    def _from(self, rank: int, device: torch.device) -> Inbox:
        if rank not in self._inboxes:
            self._inboxes[rank] = Inbox(ChannelEnd(self.group, rank, 0, "what it has", self.status), device)
        return self._inboxes[rank]
