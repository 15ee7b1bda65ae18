"""A LightningModule's forward as a pipeline of stages, trained by a stretto.Trainer."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

import stretto
from stretto.errors import UsageError
from stretto.lightning.batch_parts import StepExamples, joined, size_of
from stretto.lightning.logged_values import (
    StepRecord,
    counts,
    detached,
    merged,
    metric_states,
    metrics_of,
    metrics_protected,
    on_cpu,
    set_metrics,
)
from stretto.lightning.module_steps import ModuleSteps
from stretto.lightning.network import Arguments, Network, cut_network
from stretto.lightning.stage_optimizers import FollowingOptimizers
from stretto.losses.network_reads import network_of, refuse_network_reads
from stretto.losses.value import MeanOfStage
from stretto.methods import Method
from stretto.nn.batch import cut
from stretto.nn.buckets import align, tensors_of
from stretto.nn.deferred import RemoteStage
from stretto.nn.preserve import modes_restored
from stretto.optim.by_name import name_of
from stretto.optim.from_function import NamedOptimizer
from stretto.runtime import membership
from stretto.trainer.build import settled
from stretto.trainer.host import cut_of, evaluator


class Processes:
    """This process among those of the job; all methods are collectives. One process alone sends nothing."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        member = membership(timeout) if size > 1 else None
        self._group = None if member is None else member.group_set(self, timeout).whole()

    def all_of(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value, group=self._group)
        return told

    def on_first(self, value: Any) -> list[Any] | None:
        """The values of all processes, by rank, on rank 0; None elsewhere."""
        if self._group is None:
            return [value]
        told: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, told, dst=0, group=self._group)
        return told

    def from_first(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`."""
        if self._group is None:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=source, group=self._group)
        return told[0]

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def share_weights(self, module: nn.Module) -> None:
        """Give all processes the weights and buffers of rank 0."""
        if self._group is not None:
            align(tensors_of([module]), self._group)

    def share_generators(self) -> None:
        """Give all processes the states of rank 0's random generators: they are to draw the same batches."""
        if self._group is None:
            return
        states = self.from_first((random.getstate(), np.random.get_state(), torch.get_rng_state()))
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


UNEVEN = """\
Cut nothing, '1f1b(microbatches=1)' and one replica, or let training_step return a mean over the examples of its batch:
of padded texts the mean of each, with a model's logits in place of its own loss"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSettings:
    """What a pipeline is built with. `options` go to stretto.Trainer as they are, `split` to stretto.split."""

    method: str | Method
    stages: int | Sequence[int]
    network: str
    split: Mapping[str, Any]
    clip: float | None
    options: Mapping[str, Any]
    device: torch.device


@dataclass(frozen=True, eq=False)
class FinishedMinibatch:
    """A minibatch whose losses are known: the record of each of the loader's batches in it, and its own number."""

    number: int
    records: Sequence[StepRecord]


class Pipeline:
    """The stages of a module, on all processes. All methods but the properties are collectives."""

    def __init__(
        self,
        module: LightningModule,
        settings: PipelineSettings,
        processes: Processes,
        reference: torch.optim.Optimizer | None,
        example: StepExamples,
    ) -> None:
        self.module, self.processes, self._settings = module, processes, settings
        self._seed = settings.options.get("seed", 0)
        self.steps = ModuleSteps(module, settings.network, self._seed, settings.device)
        prefix = f"{settings.network}." if settings.network else ""
        example = replace(example, batch=on_cpu(example.batch))  # as the module is, until each process moves its stages
        arguments = {name: tensor.clone() for name, tensor in self.steps.caught(example).items()}
        self.network: Network = cut_network(self.steps.target, prefix, arguments, settings.stages, settings.split)
        self.trainer, self.optimizers = self._trainer(arguments, reference)
        if self.optimizers is not None:
            self.optimizers.forget_state()
        self.move()
        self.has_first = not isinstance(self.trainer.stages[0], RemoteStage)
        self.has_last = not isinstance(self.trainer.stages[-1], RemoteStage)
        self._records: dict[int, dict[tuple[int, ...], StepRecord]] = {}  # here, by minibatch and part
        self._known: dict[int, dict[tuple[int, ...], StepRecord]] = {}  # of all processes
        self._expected: dict[int, tuple[int, float]] = {}  # parts of each minibatch, and the factor of its losses
        self._evaluated: StepRecord | None = None
        self._evaluations = 0
        self._verified: set[int | None] = set()
        self._warned = False  # of batches of unequal sizes

    def _trainer(
        self, arguments: Arguments, reference: torch.optim.Optimizer | None
    ) -> tuple[stretto.Trainer, FollowingOptimizers | None]:
        # Without a reference nothing is trained.
        settings, stages = self._settings, self.network.stages
        loss = MeanOfStage(
            partial(self._loss, None),
            lambda stage: partial(self._loss, stage),
            lambda stage: partial(self._trial, stage),
            UNEVEN,
        )
        options = {
            **settings.options,
            "clip": settings.clip,
            "device": settings.device,
            "example": self.network.batch(arguments),
        }
        optimizers = None
        if reference is None:
            options.pop("heads", None)
            trainer = evaluator(stages, loss, settings.method, **options)
        else:
            chosen = settled(settings.method, name_of(reference), stages)
            rate = None if chosen.prediction is None else chosen.prediction.rate
            optimizers = FollowingOptimizers(reference, stages, rate)
            build, scheduler = NamedOptimizer(optimizers.build), optimizers.scheduler
            trainer = stretto.Trainer(stages, loss, build, chosen, scheduler=scheduler, **options)
        if len(stages) > 1 or trainer.schedule.per_turn * trainer.mesh.data > 1:
            network = network_of(stages)
            refuse_network_reads(self.module.training_step, network, "training_step")
        return trainer, optimizers

    def move(self) -> None:
        """Bring to the device what no other process holds: what is not part of a stage (metrics, losses)."""
        device = self._settings.device
        away = {
            id(tensor)
            for stage, given in zip(self.trainer.stages, self.network.stages, strict=True)
            if isinstance(stage, RemoteStage)
            for tensor in (*given.parameters(), *given.buffers())
        }
        for metric in metrics_of(self.module).values():
            metric.to(device)
        for part in self.module.modules():
            if isinstance(part, LightningModule):
                part._device = device
            for parameter in part._parameters.values():
                if parameter is not None and id(parameter) not in away:
                    parameter.data = parameter.data.to(device)
            for name, buffer in part._buffers.items():
                if buffer is not None and id(buffer) not in away and buffer.device != device:
                    part._buffers[name] = buffer.to(device)

    # -- training ---------------------------------------------------------------------------------------------------

    def step(
        self, batches: Sequence[Any], arguments: Sequence[tuple[Any, ...]], accumulate: int
    ) -> list[FinishedMinibatch]:
        """Train on one minibatch of these batches of the loader. Returns the minibatches whose losses are now known.

        `accumulate` is the number of batches that their losses are divided by, as Lightning does.
        """
        number, whole = self.trainer.entered, joined(batches)
        sizes = [size_of(batch) for batch in batches]
        if len({*sizes}) > 1:
            self._warn_of_sizes(sizes)
        starts = [sum(size or 0 for size in sizes[:index]) for index in range(len(sizes))]
        examples = StepExamples("training_step", number, whole, arguments, tuple(starts), 0, size_of(whole))
        parts = self._parts(examples)
        self._expected[number] = (len(parts), len(batches) / accumulate)
        if self.optimizers is not None:
            self.optimizers.begin(number)
        before = counts(self.module)
        x = self._inputs(parts) if self.has_first else None
        self.trainer.step(x, examples)
        self._exchange(before)
        return self._complete(number - self.trainer.lag)

    def flush(self) -> list[FinishedMinibatch]:
        """Finish what is in flight. Returns the minibatches that `step` has not returned yet."""
        before = counts(self.module)
        self.trainer.flush()
        self._exchange(before)
        return self._complete(self.trainer.entered)

    def _warn_of_sizes(self, sizes: Sequence[int | None]) -> None:
        if not self._warned:
            rank_zero_warn(
                f"accumulate_grad_batches: the batches of one minibatch have {', '.join(map(str, sizes))} examples. "
                "Their losses are weighted by them, where Lightning gives all the same weight; "
                "DataLoader(..., drop_last=True) leaves the short one out"
            )
        self._warned = True

    def _parts(self, examples: StepExamples) -> list[StepExamples]:
        whole = cut_of(self.trainer)
        if examples.size is not None and examples.size < whole.parts:
            raise whole.too_few(
                examples.size,
                f"a batch of {examples.size} examples cannot be cut into {whole}, as {whole.method} cuts them",
                "larger batches",
                "DataLoader(..., drop_last=True)",
            )
        return [part for piece in cut(examples, whole.pieces) for part in cut(piece, whole.replicas)]

    def _inputs(self, parts: Sequence[StepExamples]) -> Any:
        caught = [self.steps.caught(part) for part in parts]
        names = list(caught[0])
        for other in caught:
            if list(other) != names:
                raise UsageError(
                    f"training_step calls self(...) with {', '.join(names)} for one micro-batch and with "
                    f"{', '.join(other)} for another: give it the same arguments"
                )
        return self.network.batch(
            {
                name: caught[0][name] if len(caught) == 1 else torch.cat([each[name] for each in caught])
                for name in names
            }
        )

    def _loss(self, stage: int | None, output: Any, examples: StepExamples) -> Tensor:
        # What the stages' Trainer calls: for the output of the model, and of heads.
        last = len(self.network.stages) - 1
        if stage in (None, last):
            output = self.network.output(output)
        if stage is None:
            return self._evaluate(output, examples)
        number, part = examples.number, examples.path
        records = self._records.setdefault(number, {})
        verify = stage not in self._verified
        self._verified.add(stage)
        if stage < last or part in records:  # a head's, or recomputed: not logged
            with metrics_protected(self.module):
                loss = self.steps.loss(examples, output, None, verify=False)
        else:
            records[part] = record = StepRecord(examples.owner, examples.size)
            loss = self.steps.loss(examples, output, record, verify=verify and torch.is_grad_enabled())
        factor = self._expected[number][1]
        return loss if factor == 1 else loss * factor

    def _trial(self, stage: int, output: Any, examples: StepExamples) -> Tensor:
        # The same for checks, of any examples of a minibatch.
        if stage == len(self.network.stages) - 1:
            output = self.network.output(output)
        loss, factor = self.steps.trial(examples, output), self._expected[examples.number][1]
        return loss if factor == 1 else loss * factor

    def _exchange(self, before: Mapping[str, int]) -> None:
        # Tells all processes what the steps did where the last stage is.
        mine: Any = None
        states: Any = {}
        if self.has_last:
            mine, states = self._records, metric_states(self.module, before)
        self._records = {}
        if self.processes.size == 1:
            told = [(mine, states)]
        else:
            records = mine and {n: {part: on_cpu_record(r) for part, r in parts.items()} for n, parts in mine.items()}
            with self.trainer.backend.abort_all_on_error():
                told = self.processes.all_of((records, on_cpu(states)))
        self._refuse_metrics_of_replicas([name for _, states in told for name in states])
        for records, others in told:
            for number, parts in (records or {}).items():
                self._known.setdefault(number, {}).update(parts)
            if others and not self.has_last:
                set_metrics(self.module, others)

    def _refuse_metrics_of_replicas(self, updated: Sequence[str]) -> None:
        if updated and self.processes.size > 1 and self.trainer.mesh.data > 1:
            raise UsageError(
                f"training_step updates the torchmetrics objects {', '.join(dict.fromkeys(updated))}, of which each of "
                f"{self.trainer.mesh.data} replicas would have its own: log numbers, self.log('accuracy', value)"
            )

    def _complete(self, last: int) -> list[FinishedMinibatch]:
        steps = []
        for number in sorted(self._known):
            if number <= last and len(self._known[number]) == self._expected[number][0]:
                parts = self._known.pop(number)
                del self._expected[number]
                by_owner: dict[int, list[StepRecord]] = {}
                for _, record in sorted(parts.items()):
                    by_owner.setdefault(record.owner, []).append(record)
                steps.append(FinishedMinibatch(number, [merged(records) for _, records in sorted(by_owner.items())]))
        return steps

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, kind: str, batch: Any, arguments: tuple[Any, ...]) -> StepRecord:
        """Run validation_step, test_step or predict_step on a batch."""
        examples = StepExamples(kind, self._evaluations, batch, [arguments], size=size_of(batch))
        self._evaluations += 1
        before = counts(self.module)
        x = self.network.batch(self.steps.caught(examples)) if self.has_first else None
        self._evaluated = None
        self.trainer.evaluate([(x, examples)])
        record: StepRecord | None = self._evaluated
        if self.processes.size > 1:
            here = record is not None
            told_here = (on_cpu_record(record), on_cpu(metric_states(self.module, before))) if record else None
            with self.trainer.backend.abort_all_on_error():
                told = next(each for each in self.processes.all_of(told_here) if each is not None)
            record = told[0]
            if not here:
                set_metrics(self.module, told[1])
        assert record is not None, "the last stage's process has run the step"
        return record

    def _evaluate(self, output: Any, examples: StepExamples) -> Tensor:
        self._evaluated = record = StepRecord(0, examples.size)
        record.returned = detached(self.steps.run(examples, output, record))
        return torch.zeros(())

    # -- weights ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> "Snapshot | None":
        """All that training needs to go on, on rank 0; None elsewhere. Flushes first."""
        state = self.trainer.state_dict()
        state.pop("extra"), state.pop("stretto"), state.pop("torch")
        numbers = {} if self.optimizers is None else self.optimizers.numbers_of()
        with self.trainer.backend.abort_all_on_error():
            told = self.processes.on_first((state["stages"], numbers))
        if told is None:
            return None
        stages: dict[int, dict[int, Any]] = {}
        all_numbers: dict[int, dict[int, int]] = {}
        for of_replicas, of_stages in told:
            all_numbers |= of_stages
            for replica, states in of_replicas.items():
                stages.setdefault(replica, {}).update(states)
        return Snapshot({**state, "stages": stages, "losses": dict(state["losses"])}, all_numbers)

    def named(self, snapshot: "Snapshot") -> dict[str, Tensor]:
        """The weights of all stages under the names of the LightningModule."""
        gathered = {
            f"{index}.{name}": tensor
            for index, state in snapshot.state["stages"][0].items()
            for name, tensor in state["module"].items()
        }
        names = {f"{self.network.prefix}{name}" for name in self.network.stages.model_state({})}
        model = self.network.stages.model_state(gathered)
        whole = dict(self.module.state_dict())
        return whole | {name: model[name.removeprefix(self.network.prefix)] for name in names if name in whole}

    def finish(self) -> None:
        """Give the module the trained weights of all stages, on all processes."""
        with self.trainer.backend.abort_all_on_error():
            self.trainer.flush()
            if self.processes.size == 1:
                return
            states = {
                f"{index}.{name}": tensor.cpu()
                for index, stage in enumerate(self.trainer.stages)
                if not isinstance(stage, RemoteStage)
                for name, tensor in stage.state_dict().items()
            }
            gathered = {key: value for each in self.processes.all_of(states) for key, value in each.items()}
        model = self.network.stages.model_state(gathered)
        own = self.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in model.items():
                there = own.get(f"{self.network.prefix}{name}")
                if isinstance(there, Tensor) and there is not value:
                    there.data = value.to(there.device) if there.dtype != value.dtype else there.data.copy_(value)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a Trainer of all processes, and the numbers of parameters in the reference optimizer by stage."""

    state: dict[str, Any]
    numbers: dict[int, dict[int, int]]

    def optimizer_states(self) -> dict[int, Any]:
        """The state of each stage's optimizer, in replica 0."""
        return {
            index: state["optimizer"]
            for index, state in self.state["stages"][0].items()
            if state["optimizer"] is not None
        }


def on_cpu_record(record: StepRecord) -> StepRecord:
    for call in record.logged:
        call.value = on_cpu(call.value)
    return StepRecord(record.owner, record.size, record.logged, on_cpu(record.loss), on_cpu(record.returned))


@contextmanager
def training_modes(module: nn.Module, modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """In this block the modules are in the modes in which training began."""
    with modes_restored([module]):
        for part, training in modes.items():
            part.training = training
        yield
