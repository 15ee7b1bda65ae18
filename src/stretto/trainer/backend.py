"""What a Trainer does differently on one process, `Backend`, and on several, `SeveralProcesses` in distributed.py."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto import checkpoint
from stretto.checkpoint import Manifest
from stretto.emulate import Emulator
from stretto.emulate.emulator import EmulatedReducer, EmulatedReplicas, LocalServers, OrderedReplicas, record
from stretto.errors import UsageError
from stretto.losses import BatchMeans
from stretto.mesh import Mesh
from stretto.nn.batch import call, common_length, first_size, inputs_on, target_on, to_device
from stretto.nn.devices import pick_device
from stretto.nn.preserve import evaluating
from stretto.nn.shapes import trace
from stretto.replicas import Order, Sync
from stretto.replicas.parameter_server.client import Servers
from stretto.replicas.reducer import ReplicaReducer
from stretto.schedule import Delays, Rules, Schedule
from stretto.stage.interpreter import Interpreter, Profile
from stretto.stage.intra_stage import StageSharing
from stretto.stage.stage import Stage
from stretto.stage.trainer_arguments import Specification
from stretto.tracing import Recording
from stretto.trainer.evaluate import Metric, Tally

State = dict[str, Tensor]
Outputs = list[tuple[Tensor, ...]]  # of each stage, for one example


class InterpreterPlan(NamedTuple):
    """A schedule with its rules and delays, for one interpreter to run."""

    schedule: Schedule
    rules: Rules
    delays: Delays


class Backend:
    """How a Trainer works with other processes. This class is for one process, where every worker is emulated.

    `SeveralProcesses` overrides what sends messages; all methods that do so are collectives.
    """

    rank, size = 0, 1
    closed = False
    can_retry = True  # whether a failed step that changed nothing in this process changed nothing in any other
    sharing = StageSharing()  # how this process shares its stages with others

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.means = BatchMeans()  # what evaluations have seen of the loss and of metrics
        self._servers: Servers | None = None
        self._interpreters: list[Interpreter] = []
        self._reports: deque[Tensor] = deque()  # of this process, unread

    def workers(self, requested: int | None, num_stages: int) -> int | None:
        """The number of workers to lay the schedule out for; None: as many as suit the method.

        Raises UsageError if `requested` does not fit the processes.
        """
        return requested

    def holds(self, worker: int) -> bool:
        """Whether that worker's stages live in this process."""
        return True

    @property
    def replicas(self) -> Sequence[int]:
        """The replicas that have stages in this process; the first of them is the one evaluated here."""
        return range(self._mesh.data)

    @property
    def writes(self) -> bool:
        """True on the first of the processes that hold the same weights, which writes them."""
        return True

    @property
    def every_stage(self) -> Sequence[Stage]:
        """The stages of this process, in all emulated replicas."""
        return self._interpreters[0].every_stage

    def grad_norms(self) -> dict[int, float]:
        """The norm of each stage's last gradients in this process, by stage, where it is measured.

        Of replicas in one process, that of the first.
        """
        norms: dict[int, float] = {}
        for stage in self.every_stage:
            if stage.gradient_norms is not None and stage.index not in norms:
                norms[stage.index] = float(torch.linalg.vector_norm(stage.gradient_norms.double()))
        return norms

    def device(self, requested: str | torch.device) -> torch.device:
        """The device of this process; "auto" takes an accelerator if there is one."""
        return pick_device(requested)

    def share(self, modules: Sequence[nn.Module | None]) -> None:
        """Give all replicas the weights and buffers of replica 0. (Emulated ones will be copied from it.)"""

    def shard(
        self, stages: Sequence[nn.Module], heads: Sequence[nn.Module | None], sync: Sync, device: torch.device
    ) -> None:
        """Leave each replica only its share of the weights, if `sync` shards them.

        Emulated replicas keep whole weights, and the numbers are the same.
        """

    def reducer(self, sync: Sync) -> ReplicaReducer | Servers:
        """Connects the copies of one stage in all replicas. Raises UsageError for a `sync` that cannot run here."""
        if sync.serving is not None:
            self._servers = self._servers or LocalServers(sync.serving, self._mesh.data)
            return self._servers
        hook = None if sync.reducing is None else sync.reducing.hook
        if hook == "powersgd" and not _in_one_process.get():
            raise UsageError(f"{sync} is not emulated: start processes, or leave the hook out")
        return EmulatedReducer(self._mesh.data, hook)

    def order(self) -> Order | None:
        """The order of all stages' updates on a parameter server, on rank 0; None elsewhere, and without a server."""
        return None if self._servers is None else self._servers.order()

    def interpreters(
        self, plans: Sequence[InterpreterPlan], replicas: Sequence[Mapping[int, Stage]], lag: int, device: torch.device
    ) -> list[Interpreter]:
        """An interpreter for each plan, on this process's stages of each of `replicas`; one of them runs at a time."""
        if len(replicas) == 1:
            self._interpreters = [Emulator(plan.schedule, plan.rules, replicas[0], plan.delays) for plan in plans]
        else:
            kind = EmulatedReplicas if self._servers is None else OrderedReplicas
            self._interpreters = [kind(plan.schedule, plan.rules, replicas, plan.delays) for plan in plans]
        return self._interpreters

    def profile(self, profile: Profile | None) -> None:
        """Run each action of this process in a context that `profile` makes for it from now on; None ends that."""
        for interpreter in self._interpreters:
            interpreter.profile = profile

    def record(self, device: torch.device) -> list[Recording]:
        """Record the actions of each worker in this process from now on, whichever of the interpreters runs."""
        return record([interpreter for interpreter in self._interpreters if isinstance(interpreter, Emulator)], device)

    def agree(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Raise UsageError if the processes are about to train different things; `device` is this one's."""

    def compare(self, description: Mapping[str, Any], what: str, remedy: str) -> None:
        """Raise UsageError, on all processes, where descriptions differ: rank so and so `what` than rank 0.

        None says nothing of its key.
        """

    def any_process(self, wanted: bool) -> bool:
        """Whether any process wants it, told to all."""
        return bool(self.all_reduce_max([wanted])[0])

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """The largest of all processes' values, entry by entry, told to all."""
        return [float(value) for value in values]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every process: numbers, text, lists and dicts, as JSON has them."""
        return value

    def calibrate(self, sync: Sync) -> None:
        """Find the calibration of `all-reduce(algorithm=auto)`. Raises UsageError for a file that is not one.

        Emulated replicas send no messages: only the file is checked.
        """
        file = None if sync.reducing is None else sync.reducing.calibration
        if file is not None and not _in_one_process.get():
            from stretto.collectives import Calibration

            Calibration.read(file)

    def trace(self, stages: Sequence[nn.Module], example: Any, device: torch.device, *, any_output: bool) -> Outputs:
        """Each stage's outputs for one example: shapes and dtypes on every process, values on the stage's own.

        `any_output` as in `stretto.nn.shapes.trace`.
        """
        return trace(stages, example, device, any_output=any_output)

    def refresh(self, stages: Mapping[int, Stage], rules: Rules) -> None:
        """Copy tied weights from their owners to the stages that borrow them. (Here they are one object.)"""

    def evaluate(
        self,
        stages: Sequence[nn.Module],
        specification: Specification,
        batches: Iterable[tuple[Any, Any]],
        metrics: Sequence[Metric],
    ) -> dict[str, float]:
        """The mean "loss", the "accuracy" and the metrics, as `Trainer.evaluate` says, the same on every process."""
        precision, tally = specification.precision, Tally(metrics, self.means)
        with self._evaluating(stages):
            for x, y in self._read_here(batches):

                def count(output: Any, examples: int, x: Any = x, y: Any = y) -> None:
                    target = target_on(y, specification.device)
                    examples = examples or first_size(target) or first_size(x)
                    tally.add(precision.outputs(output), target, specification.loss, examples)

                self._forward(stages, specification, x, count)
        return tally.result(self._sums_of_last(stages, tally.sums()))

    def predict(
        self, stages: Sequence[nn.Module], specification: Specification, batches: Iterable[Any]
    ) -> list[Any] | None:
        """The output for each batch of inputs, on the CPU, as the loss would get it, on rank 0; None elsewhere."""
        outputs: list[Any] = []

        def keep(output: Any, _: int) -> None:
            outputs.append(to_device(specification.precision.outputs(output), torch.device("cpu")))

        with self._evaluating(stages):
            for x in batches:
                self._forward(stages, specification, x, keep)
        return outputs

    @contextmanager
    def _evaluating(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        with evaluating(stages), torch.no_grad():
            yield

    def _read_here(self, batches: Iterable[Any]) -> Iterable[Any]:
        # The batches that this process's replica runs: all, or none.
        return batches

    def _forward(
        self, stages: Sequence[nn.Module], specification: Specification, x: Any, use: Callable[[Any, int], None]
    ) -> None:
        """Run a batch through the stages; where the last one is, call use(output, examples: 0 if x does not tell)."""
        given: Any = specification.precision.inputs(inputs_on(x, specification.device))
        examples = common_length(given)
        with specification.precision.forward(specification.device):
            for stage in stages:
                output = call(stage, given)
                given = output if isinstance(output, tuple) else (output,)
            use(output, examples)

    def _sums_of_last(self, stages: Sequence[nn.Module], sums: list[float]) -> list[float]:
        # The sums of the process that has counted.
        return sums

    def gather(self, states: Mapping[int, State]) -> dict[int, State] | None:
        """The states of all processes' stages, by stage, on rank 0; None elsewhere. `states` are this process's."""
        return dict(states)

    def report(self, message: Tensor) -> None:
        """Send a message to rank 0, without waiting for it to be read."""
        self._reports.append(message)

    def reports(self) -> list[Tensor]:
        """On rank 0: the oldest unread message of every process, by rank."""
        return [self._reports.popleft()]

    def collect(self, message: Tensor) -> list[Tensor]:
        """The messages of all processes, by rank, on rank 0; an empty list elsewhere."""
        return [message]

    def save(
        self, path: str | os.PathLike[str], replicas: Sequence[Mapping[int, Mapping[str, Any]]], manifest: Manifest
    ) -> None:
        """Write a checkpoint of all stages. `replicas`: this process's stage states, one mapping a replica."""
        first, *others = (states.values() for states in replicas)
        checkpoint.write(path, first, manifest, others)

    def close(self) -> None:
        """Nothing is done with it any more; a collective."""
        self.give_up()

    def give_up(self) -> None:
        """Nothing is done with it any more in this process."""
        self.closed = True

    def abort_all_on_error(self) -> AbstractContextManager[None]:
        """The context for work that all processes do together: an error on one of them ends all.

        Raises UsageError once it has been closed.
        """
        if self.closed:
            raise UsageError("this Trainer has been closed (close(), or the end of its with block): make a new one")
        return self._abort_all_on_error()

    def _abort_all_on_error(self) -> AbstractContextManager[None]:
        return nullcontext()

    def should_stop(self, step: int, ahead: int, wanted: bool, request: str = "last step") -> bool:
        """Whether to stop after this step, since one process has `wanted` it: all stop after the same step.

        Every process asks after each of its steps. `ahead` is how many steps one may be ahead of another. A `request`
        that was granted once stays so: who goes on asks for another.
        """
        return wanted

    def new_request(self) -> str:
        """A name for `should_stop` that has not been used yet, the same on all processes."""
        return ""


_in_one_process: ContextVar[bool] = ContextVar("in_one_process", default=False)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Trainers made in this context emulate all workers even under a launcher: for trials, or to count FLOPs."""
    token = _in_one_process.set(True)
    try:
        yield
    finally:
        _in_one_process.reset(token)


def emulates_all() -> bool:
    """Whether this is inside a block of `in_one_process`."""
    return _in_one_process.get()
