"""What a Trainer does differently on one process and on several: the interface `Backend`, and `OneProcess`."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto import checkpoint
from stretto.checkpoint import Manifest
from stretto.emulate import Emulator
from stretto.emulate.emulated_reducer import EmulatedReducer
from stretto.emulate.emulation_recorder import record
from stretto.emulate.local_servers import LocalServers
from stretto.emulate.replay import OrderedReplicas
from stretto.emulate.replica_emulator import EmulatedReplicas
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.nn.chain import Chain
from stretto.nn.devices import pick_device
from stretto.nn.shapes import trace
from stretto.replicas import Order, Sync
from stretto.replicas.parameter_server.servers import Servers
from stretto.replicas.reducer import ReplicaReducer
from stretto.schedule import Delays, Rules, Schedule
from stretto.stage.interpreter import Interpreter
from stretto.stage.intra_stage import StageSharing
from stretto.stage.stage import Stage
from stretto.stage.trainer_specification import Specification
from stretto.tracing import Recording
from stretto.trainer.evaluate import evaluate, predict
from stretto.trainer.metrics import Metric

State = dict[str, Tensor]
Outputs = list[tuple[Tensor, ...]]  # of each stage, for one example


class InterpreterPlan(NamedTuple):
    """A schedule with its rules and delays, for one interpreter to run."""

    schedule: Schedule
    rules: Rules
    delays: Delays


class Backend(ABC):
    """What a Trainer does differently on one process and on several."""

    @abstractmethod
    def workers(self, requested: int | None, num_stages: int) -> int | None:
        """The number of workers to lay the schedule out for; None: as many as suit the method.

        Raises UsageError if `requested` does not fit the processes.
        """

    @abstractmethod
    def holds(self, worker: int) -> bool:
        """Whether that worker's stages live in this process."""

    @property
    @abstractmethod
    def replicas(self) -> Sequence[int]:
        """The replicas that have stages in this process; the first of them is the one evaluated here."""

    sharing: StageSharing  # how this process shares its stages with others

    @abstractmethod
    def share(self, modules: Sequence[nn.Module | None]) -> None:
        """Give all replicas the weights and buffers of replica 0."""

    @abstractmethod
    def shard(
        self, stages: Sequence[nn.Module], heads: Sequence[nn.Module | None], sync: Sync, device: torch.device
    ) -> None:
        """Leave each replica only its share of the weights, if `sync` shards them."""

    @abstractmethod
    def reducer(self, sync: Sync) -> ReplicaReducer | Servers:
        """Connects the copies of one stage in all replicas. Raises UsageError for a `sync` that cannot run here."""

    @abstractmethod
    def order(self) -> Order | None:
        """The order of all stages' updates on a parameter server, on rank 0; None elsewhere, and without a server."""

    @abstractmethod
    def device(self, requested: str | torch.device) -> torch.device:
        """The device of this process."""

    @abstractmethod
    def interpreters(
        self, plans: Sequence[InterpreterPlan], replicas: Sequence[Mapping[int, Stage]], lag: int, device: torch.device
    ) -> list[Interpreter]:
        """An interpreter for each plan, on this process's stages of each of `replicas`; one of them runs at a time."""

    @abstractmethod
    def record(self, interpreters: Sequence[Interpreter], device: torch.device) -> list[Recording]:
        """Record the actions of each worker in this process from now on, whichever of the interpreters runs."""

    @abstractmethod
    def agree(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Raise UsageError if the processes are about to train different things; `device` is this one's."""

    @abstractmethod
    def compare(self, description: Mapping[str, Any], what: str, remedy: str) -> None:
        """Raise UsageError, on all processes, where descriptions differ: rank so and so `what` than rank 0.

        None says nothing of its key.
        """

    def anyone(self, wanted: bool) -> bool:
        """Whether any process wants it, told to all."""
        return bool(self.largest(torch.tensor([int(wanted)])).item())

    @abstractmethod
    def largest(self, values: Tensor) -> Tensor:
        """The largest of all processes' values, entry by entry, told to all."""

    @abstractmethod
    def told_by_first(self, said: bytes) -> bytes:
        """What rank 0 says, on every process; what the others say is not looked at."""

    @abstractmethod
    def calibrate(self, sync: Sync) -> None:
        """Find the calibration of `all-reduce(algorithm=auto)`. Raises UsageError for a file that is not one."""

    @abstractmethod
    def trace(self, stages: Sequence[nn.Module], example: Any, device: torch.device, *, any_output: bool) -> Outputs:
        """Each stage's outputs for one example: shapes and dtypes on every process, values on the stage's own.

        `any_output` as in `stretto.nn.shapes.trace`.
        """

    @abstractmethod
    def refresh(self, stages: Mapping[int, Stage], rules: Rules) -> None:
        """Copy tied weights from the stages that own them to those that borrow them."""

    @abstractmethod
    def evaluate(
        self,
        stages: Sequence[nn.Module],
        specification: Specification,
        batches: Iterable[tuple[Any, Any]],
        metrics: Sequence[Metric],
    ) -> dict[str, float]:
        """As `stretto.trainer.evaluate.evaluate`, the same on every process."""

    @abstractmethod
    def predict(
        self, stages: Sequence[nn.Module], specification: Specification, batches: Iterable[Any]
    ) -> list[Any] | None:
        """As `stretto.trainer.evaluate.predict`, on rank 0; None elsewhere."""

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether this process writes its stages' weights: the first of those that have the same."""

    @abstractmethod
    def gather(self, states: Mapping[int, State]) -> dict[int, State] | None:
        """The states of all processes' stages, by stage, on rank 0; None elsewhere. `states` are this process's."""

    @abstractmethod
    def report(self, message: Tensor) -> None:
        """Send a message to rank 0, without waiting for it to be read."""

    @abstractmethod
    def reports(self) -> list[Tensor]:
        """On rank 0: the oldest unread message of every process, by rank."""

    @abstractmethod
    def collect(self, message: Tensor) -> list[Tensor]:
        """The messages of all processes, by rank, on rank 0; an empty list elsewhere."""

    @abstractmethod
    def save(
        self, path: str | os.PathLike[str], replicas: Sequence[Mapping[int, Mapping[str, Any]]], manifest: Manifest
    ) -> None:
        """Write a checkpoint of all stages. `replicas`: this process's stage states, one mapping a replica."""

    closed = False

    def close(self) -> None:
        """Nothing is done with it any more; a collective."""
        self.give_up()

    def give_up(self) -> None:
        """Nothing is done with it any more in this process."""
        self.closed = True

    def together(self) -> AbstractContextManager[None]:
        """The context for work that all processes do together: an error on one of them ends all.

        Raises UsageError once it has been closed.
        """
        if self.closed:
            raise UsageError("this Trainer has been closed (close(), or the end of its with block): make a new one")
        return self._together()

    @abstractmethod
    def _together(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def last_step(self, step: int, ahead: int, wanted: bool, request: str = "last step") -> int | None:
        """The step after which all processes stop, once one of them has `wanted` it; None before that.

        Every process asks after each of its steps. `ahead` is how many steps one may be ahead of another. A `request`
        that was granted once stays so: who goes on asks for another.
        """

    @abstractmethod
    def new_request(self) -> str:
        """A name for `last_step` that has not been used yet, the same on all processes."""

    @property
    @abstractmethod
    def can_retry(self) -> bool:
        """Whether a failed step that changed nothing in this process changed nothing in any other."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of processes."""


class OneProcess(Backend):
    """One process: every worker of every replica is emulated."""

    rank, size = 0, 1
    can_retry = True
    sharing = StageSharing()

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._servers: LocalServers | None = None
        self._reports: deque[Tensor] = deque()

    def workers(self, requested: int | None, num_stages: int) -> int | None:
        """As requested: one process emulates any number of workers."""
        return requested

    def holds(self, worker: int) -> bool:
        """Always: every worker is emulated here."""
        return True

    @property
    def replicas(self) -> Sequence[int]:
        """All replicas: they are emulated here."""
        return range(self._mesh.data)

    def share(self, modules: Sequence[nn.Module | None]) -> None:
        """Do nothing: the other replicas will be copied from replica 0."""

    def shard(
        self, stages: Sequence[nn.Module], heads: Sequence[nn.Module | None], sync: Sync, device: torch.device
    ) -> None:
        """Do nothing: emulated replicas keep whole weights, and the numbers are the same."""

    def reducer(self, sync: Sync) -> ReplicaReducer | Servers:
        """Parameter servers in this process, or a reducer of replicas that take turns."""
        if sync.serving is not None:
            self._servers = self._servers or LocalServers(sync.serving, self._mesh.data)
            return self._servers
        hook = None if sync.reducing is None else sync.reducing.hook
        if hook == "powersgd" and not _in_one_process.get():
            raise UsageError(f"{sync} is not emulated: start processes, or leave the hook out")
        return EmulatedReducer(self._mesh.data, hook)

    def order(self) -> Order | None:
        """The whole order: all servers are in this process."""
        return None if self._servers is None else self._servers.order()

    def device(self, requested: str | torch.device) -> torch.device:
        """The requested device; "auto" takes an accelerator if there is one."""
        return pick_device(requested)

    def interpreters(
        self, plans: Sequence[InterpreterPlan], replicas: Sequence[Mapping[int, Stage]], lag: int, device: torch.device
    ) -> list[Interpreter]:
        """An emulator for each plan, which runs every replica."""
        if len(replicas) == 1:
            return [Emulator(plan.schedule, plan.rules, replicas[0], plan.delays) for plan in plans]
        kind = EmulatedReplicas if self._servers is None else OrderedReplicas
        return [kind(plan.schedule, plan.rules, replicas, plan.delays) for plan in plans]

    def record(self, interpreters: Sequence[Interpreter], device: torch.device) -> list[Recording]:
        """One recording for each worker of the schedule."""
        return record([interpreter for interpreter in interpreters if isinstance(interpreter, Emulator)], device)

    def agree(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Do nothing: there is no other process."""

    def compare(self, description: Mapping[str, Any], what: str, remedy: str) -> None:
        """Do nothing: there is no other process."""

    def largest(self, values: Tensor) -> Tensor:
        """This process's values."""
        return values

    def told_by_first(self, said: bytes) -> bytes:
        """What this process says."""
        return said

    def calibrate(self, sync: Sync) -> None:
        """Only check the file that `sync` names: emulated replicas send no messages."""
        file = None if sync.reducing is None else sync.reducing.calibration
        if file is not None and not _in_one_process.get():
            from stretto.collectives import Calibration

            Calibration.read(file)

    def trace(self, stages: Sequence[nn.Module], example: Any, device: torch.device, *, any_output: bool) -> Outputs:
        """Run one stage after the other."""
        return trace(stages, example, device, any_output=any_output)

    def refresh(self, stages: Mapping[int, Stage], rules: Rules) -> None:
        """Do nothing: tied weights are the same objects on all stages."""

    def evaluate(
        self,
        stages: Sequence[nn.Module],
        specification: Specification,
        batches: Iterable[tuple[Any, Any]],
        metrics: Sequence[Metric],
    ) -> dict[str, float]:
        """Evaluate the whole model in this process."""
        return evaluate(Chain(*stages), specification, batches, metrics)

    def predict(self, stages: Sequence[nn.Module], specification: Specification, batches: Iterable[Any]) -> list[Any]:
        """Run the whole model in this process."""
        return predict(Chain(*stages), specification, batches)

    @property
    def writes(self) -> bool:
        """True: the only process writes what there is to write."""
        return True

    def gather(self, states: Mapping[int, State]) -> dict[int, State] | None:
        """The given states: all stages are in this process."""
        return dict(states)

    def report(self, message: Tensor) -> None:
        """Keep it."""
        self._reports.append(message)

    def reports(self) -> list[Tensor]:
        """The oldest of this process."""
        return [self._reports.popleft()]

    def collect(self, message: Tensor) -> list[Tensor]:
        """This process's message alone."""
        return [message]

    def save(
        self, path: str | os.PathLike[str], replicas: Sequence[Mapping[int, Mapping[str, Any]]], manifest: Manifest
    ) -> None:
        """Write all replicas' stages: they are in this process."""
        first, *others = (states.values() for states in replicas)
        checkpoint.write(path, first, manifest, others)

    _together = staticmethod(nullcontext[None])  # there is no other process to end

    def new_request(self) -> str:
        """Any: nothing is kept."""
        return ""

    def last_step(self, step: int, ahead: int, wanted: bool, request: str = "last step") -> int | None:
        """The current step, if `wanted`: there is no other process to wait for."""
        return step if wanted else None


_in_one_process: ContextVar[bool] = ContextVar("in_one_process", default=False)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Trainers made in this context emulate all workers even under a launcher: for trials, or to count FLOPs."""
    token = _in_one_process.set(True)
    try:
        yield
    finally:
        _in_one_process.reset(token)


def find_backend(timeout: float, mesh: Mesh) -> Backend:
    """The backend of this process alone, or of all that a launcher started; waits for others end after `timeout` s."""
    from stretto.runtime import membership  # slow to import
    from stretto.trainer.distributed import SeveralProcesses

    member = None if _in_one_process.get() else membership(timeout)
    return OneProcess(mesh) if member is None else SeveralProcesses(member, timeout, mesh)
