"""What a Trainer does differently in one process and in several: the interface `Backend`, and `OneProcess`."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto import checkpoint
from stretto.checkpoint import Manifest
from stretto.emulate import Emulator
from stretto.emulate.local_servers import LocalServers
from stretto.emulate.meeting import EmulatedReducer
from stretto.emulate.recorder import record
from stretto.emulate.replica_emulator import EmulatedReplicas
from stretto.emulate.update_order import OrderedReplicas
from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.nn.chain import Chain
from stretto.nn.devices import pick_device
from stretto.nn.shapes import trace
from stretto.replicas import Order, Sync
from stretto.replicas.parameter_server.servers import Servers
from stretto.replicas.reduction import ReplicaReducer
from stretto.schedule import Delays, Rules, Schedule
from stretto.stage.interpreter import Interpreter
from stretto.stage.shared_stage import StageSharing
from stretto.stage.specification import Specification
from stretto.stage.stage import Stage
from stretto.tracing import Recording
from stretto.trainer.evaluate import evaluate

State = dict[str, Tensor]
Outputs = list[tuple[Tensor, ...]]  # of every stage, for one example


class InterpreterPlan(NamedTuple):
    """What an interpreter runs."""

    schedule: Schedule
    rules: Rules
    delays: Delays


class Backend(ABC):
    """What a Trainer does otherwise on several processes than on one."""

    @abstractmethod
    def workers(self, asked: int | None, num_stages: int) -> int | None:
        """How many workers the schedule is for; None for as many as suit it. Raises UsageError if it cannot be."""

    @abstractmethod
    def holds(self, worker: int) -> bool:
        """Whether that worker's stages live in this process."""

    @property
    @abstractmethod
    def replicas(self) -> Sequence[int]:
        """The replicas of which something lives in this process; the first one is the one that is evaluated here."""

    within: StageSharing  # how this process shares its stages with others

    @abstractmethod
    def share(self, modules: Sequence[nn.Module | None]) -> None:
        """Begin all replicas alike: with the weights and buffers of replica 0."""

    @abstractmethod
    def shard(self, modules: Sequence[nn.Module | None], sync: Sync, device: torch.device) -> None:
        """Leave each replica its share of the weights, if that is the choice."""

    @abstractmethod
    def peers(self, sync: Sync) -> ReplicaReducer | Servers:
        """What the copies of one stage in all replicas meet by. Raises UsageError if they cannot do as chosen."""

    @abstractmethod
    def order(self) -> Order | None:
        """Of a parameter server, the updates of all stages, on the first process; None elsewhere and without one."""

    @abstractmethod
    def device(self, asked: str | torch.device) -> torch.device:
        """The device of this process."""

    @abstractmethod
    def interpreters(
        self, plans: Sequence[InterpreterPlan], replicas: Sequence[Mapping[int, Stage]], lag: int, device: torch.device
    ) -> list[Interpreter]:
        """What runs each plan on the stages of each replica that live here; they take turns."""

    @abstractmethod
    def record(self, interpreters: Sequence[Interpreter], device: torch.device) -> list[Recording]:
        """Record from now on what each worker does that lives here, whichever of the interpreters runs."""

    @abstractmethod
    def agree(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Raise UsageError if the processes are about to train different things; `device` is this one's."""

    @abstractmethod
    def calibrate(self, sync: Sync) -> None:
        """Find what `all-reduce(algorithm=auto)` goes by. Raises UsageError for a file that is no calibration."""

    @abstractmethod
    def trace(self, stages: Sequence[nn.Module], example: Any, device: torch.device) -> Outputs:
        """What each stage gives for one example; shapes and types are right everywhere, numbers where a stage lives."""

    @abstractmethod
    def refresh(self, stages: Mapping[int, Stage], rules: Rules) -> None:
        """Give tied weights, where they are borrowed, the values that their owner has now."""

    @abstractmethod
    def evaluate(
        self, stages: Sequence[nn.Module], of: Specification, batches: Iterable[tuple[Any, Any]]
    ) -> dict[str, float]:
        """As `stretto.trainer.evaluate.evaluate`, the same on every process."""

    @abstractmethod
    def gather(self, own: Mapping[int, State]) -> dict[int, State] | None:
        """What every process has of each stage, on the first one; None elsewhere."""

    @abstractmethod
    def save(
        self, path: str | os.PathLike[str], replicas: Sequence[Mapping[int, Mapping[str, Any]]], manifest: Manifest
    ) -> None:
        """Write a checkpoint of the stages that live here, of each of `replicas` that does, and of all others."""

    @abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """What every process does at the same time goes here: an error on one of them ends all."""

    @abstractmethod
    def last_step(self, step: int, ahead: int, wanted: bool) -> int | None:
        """After which step all stop, once one process has `wanted` it; each asks after each of its steps.

        `ahead` is how many steps a process may be ahead of another.
        """

    @property
    @abstractmethod
    def can_retry(self) -> bool:
        """Whether a step that failed and has changed nothing here has changed nothing anywhere."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this process."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many processes there are."""


class OneProcess(Backend):
    """One process: every worker of every replica is emulated."""

    rank, size = 0, 1
    can_retry = True
    within = StageSharing()

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._servers: LocalServers | None = None

    def workers(self, asked: int | None, num_stages: int) -> int | None:
        """As asked."""
        return asked

    def holds(self, worker: int) -> bool:
        """Always."""
        return True

    @property
    def replicas(self) -> Sequence[int]:
        """All."""
        return range(self._mesh.data)

    def share(self, modules: Sequence[nn.Module | None]) -> None:
        """They will be copied."""

    def shard(self, modules: Sequence[nn.Module | None], sync: Sync, device: torch.device) -> None:
        """Emulated replicas have everything: the numbers are the same."""

    def peers(self, sync: Sync) -> ReplicaReducer | Servers:
        """They take turns."""
        if sync.serving is not None:
            self._servers = self._servers or LocalServers(sync.serving, self._mesh.data)
            return self._servers
        hook = None if sync.reducing is None else sync.reducing.hook
        if hook == "powersgd" and not _in_one_process.get():
            raise UsageError(f"{sync} is not emulated: start processes, or leave the hook out")
        return EmulatedReducer(self._mesh.data, hook)

    def order(self) -> Order | None:
        """All of it."""
        return None if self._servers is None else self._servers.order()

    def device(self, asked: str | torch.device) -> torch.device:
        """As asked."""
        return pick_device(asked)

    def interpreters(
        self, plans: Sequence[InterpreterPlan], replicas: Sequence[Mapping[int, Stage]], lag: int, device: torch.device
    ) -> list[Interpreter]:
        """Emulators."""
        if len(replicas) == 1:
            return [Emulator(plan.schedule, plan.rules, replicas[0], plan.delays) for plan in plans]
        kind = EmulatedReplicas if self._servers is None else OrderedReplicas
        return [kind(plan.schedule, plan.rules, replicas, plan.delays) for plan in plans]

    def record(self, interpreters: Sequence[Interpreter], device: torch.device) -> list[Recording]:
        """One recording for each worker of the schedule."""
        return record([each for each in interpreters if isinstance(each, Emulator)], device)

    def agree(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Nobody is asked."""

    def calibrate(self, sync: Sync) -> None:
        """No messages travel; but a file that is named must be one."""
        file = None if sync.reducing is None else sync.reducing.calibration
        if file is not None and not _in_one_process.get():
            from stretto.collectives import Calibration

            Calibration.read(file)

    def trace(self, stages: Sequence[nn.Module], example: Any, device: torch.device) -> Outputs:
        """One stage after the other."""
        return trace(stages, example, device)

    def refresh(self, stages: Mapping[int, Stage], rules: Rules) -> None:
        """They are the same objects."""

    def evaluate(
        self, stages: Sequence[nn.Module], of: Specification, batches: Iterable[tuple[Any, Any]]
    ) -> dict[str, float]:
        """The model is here."""
        return evaluate(Chain(*stages), of, batches)

    def gather(self, own: Mapping[int, State]) -> dict[int, State] | None:
        """Everything is here."""
        return dict(own)

    def save(
        self, path: str | os.PathLike[str], replicas: Sequence[Mapping[int, Mapping[str, Any]]], manifest: Manifest
    ) -> None:
        """All of them are here."""
        first, *others = (states.values() for states in replicas)
        checkpoint.write(path, first, manifest, others)

    together = staticmethod(nullcontext[None])  # nobody else does anything

    def last_step(self, step: int, ahead: int, wanted: bool) -> int | None:
        """At once."""
        return step if wanted else None


_in_one_process: ContextVar[bool] = ContextVar("in_one_process", default=False)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Trainers made meanwhile emulate all workers, whatever a launcher has started: to try out, or to count FLOPs."""
    token = _in_one_process.set(True)
    try:
        yield
    finally:
        _in_one_process.reset(token)


def find_team(timeout: float, mesh: Mesh) -> Backend:
    """This process alone, or all that a launcher has started; nobody waits for another longer than `timeout` s."""
    from stretto.runtime import membership  # it takes a while
    from stretto.trainer.distributed import SeveralProcesses

    member = None if _in_one_process.get() else membership(timeout)
    return OneProcess(mesh) if member is None else SeveralProcesses(member, timeout, mesh)
