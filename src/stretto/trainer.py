"""The one object a user's script needs: stages, a loss, an optimizer and a method, trained step by step."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stretto import heads as head_kinds
from stretto import ties
from stretto.assemble import build_practices, momentum_of, warn_of_overshoot
from stretto.batch import inputs_on, micro_batches, target_on
from stretto.chain import Chain
from stretto.checkpoint import Manifest, read_manifest, read_stage, write
from stretto.emulate import Emulator
from stretto.errors import StrettoError, UsageError
from stretto.evaluate import evaluate
from stretto.generator import PreservedGenerator
from stretto.methods import Method
from stretto.methods import method as find_method
from stretto.methods.cure import Place
from stretto.observe import Observer
from stretto.parts import (
    StageLike,
    build_optimizer,
    build_scheduler,
    build_stage,
    check_heads,
    check_kinds,
    check_sharing,
    pick_device,
    refuse_processes,
    wake,
)
from stretto.phase import Phase
from stretto.precision import Precision
from stretto.schedule import Rules, Schedule
from stretto.seeding import derive
from stretto.stage import Loss, Practice, Stage, Target
from stretto.trace import example_for_linear, trace

Batch = Any  # a tensor, or a tuple of tensors


class Trainer:
    """Trains `stages`, one module after the other, with any method, on one device.

    Args:
        stages: one nn.Module per stage, in order, or a function that builds it (seeded by `seed` and the stage's
            index alone). Modules are trained in place. A stage that returns a tuple hands its members to the next
            stage as arguments. One may be compiled, `torch.compile(stage)`, but not where a method's backward sees
            other weights than its forward; `_orig_mod.` is then part of its keys, in `model`, `gather` and checkpoints.
        loss: (output, target) -> mean loss over the examples of a batch; every auxiliary head uses it too.
        optimizer: called once a stage with the parameters of the stage and its head. Stages without trainable
            parameters have none.
        method: a name, "chunked(chunks=4)", or what `stretto.method` returned.
        example: one input batch. From it come the shapes that auxiliary heads need, and the check that the stages fit
            each other. May be left out if no heads are needed, if all are given, or if every stage begins and ends
            in a Linear.
        heads: None to build them as the method says; or one entry a stage: a module, or None to have it built.
            The last stage's output is the model's output: its entry is None.
        scheduler: optimizer -> learning-rate scheduler, stepped at each update of its stage.
        clip: the largest norm that the gradients of all stages together may have; they are shrunk to it. Exact for
            synchronous methods, as torch.nn.utils.clip_grad_norm_ over the whole model. Where stages update at
            different times, each is limited to clip / sqrt(number of stages), which keeps all of them within clip.
        workers: how many workers the schedule is laid out for; one a stage unless said otherwise. It changes costs,
            never numbers.
        device: "auto" takes a CUDA device if there is one, else the CPU.
        seed: decides the weights of auxiliary heads, of stages given as functions, and everything stages draw in
            training (dropout). It depends on the stage and the micro-batch only; the global generator is left alone.
        precision: None computes as the modules are. "bf16" converts stages, heads and floating-point inputs to
            bfloat16 (norms with running statistics stay in float32); the optimizer steps float32 masters, and the loss
            gets float32 outputs. `stages` and `model` hold the bfloat16 weights, which follow the masters: give weights
            to the modules before the Trainer is made. "bf16-autocast" leaves the weights and runs forwards, heads and
            losses under torch.autocast; methods whose backward sees other weights than its forward are refused.

    Raises UsageError when the parts do not fit, before anything is trained.
    """

    def __init__(
        self,
        stages: Sequence[StageLike] | nn.Sequential | nn.ModuleList,
        loss: Loss,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        method: str | Method = "backprop",
        *,
        example: Batch | None = None,
        heads: Sequence[nn.Module | None] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        clip: float | None = None,
        workers: int | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        precision: str | None = None,
    ) -> None:
        refuse_processes()
        check_kinds(stages, loss, scheduler, heads, workers, seed, clip)
        self.method = find_method(method)
        self.device = pick_device(device)
        self.seed = seed
        self.precision = Precision(precision)
        self.loss = loss
        self.stages = [build_stage(stage, index, seed).to(self.device) for index, stage in enumerate(stages)]
        num_stages = len(self.stages)
        if not num_stages:
            raise UsageError("stages is empty: give at least one nn.Module")
        if workers is not None and not 1 <= workers <= num_stages:
            raise UsageError(f"workers={workers} for {num_stages} stages: choose between 1 and {num_stages}")
        self.clip = clip
        self._ties = ties.find(self.stages)
        if self._ties and self.method.reach(num_stages).heads != (num_stages - 1,):
            ties.refuse(self._ties, self.method)
        self.schedule, self.rules = self._plan(self.method.plan, workers)
        self.lag = self.method.lag(num_stages)
        self.heads = self._heads(heads, example)
        check_sharing(self.stages, self.heads)
        wake(self.stages)
        self._delays = self.method.delays(self.schedule)
        self._places: list[Place] = []
        self._practices: list[tuple[Practice, Practice]] = []  # of each stage: as the method says, and synchronous
        self._stages = [self._stage(index, optimizer, scheduler) for index in range(num_stages)]
        warn_of_overshoot(self.method, self._places)
        self.precision.convert([*self.stages, *self.heads])  # only now that nothing can be refused any more
        self._phases = self._make_phases(workers)
        self._phase = self._phases[self.method.phases.synchronous(0)]
        self._phase.begin(0)
        self._entered = 0  # minibatches
        self._drained = True
        self._broken: str | None = None
        self._losses: dict[int, list[Tensor]] = {}  # of the minibatches that `step` may still return
        self._finished = 0  # minibatches whose loss is known

    # -- training ---------------------------------------------------------------------------------------------------

    def step(self, x: Batch, y: Any) -> float | None:
        """One minibatch enters: x [N, ...] (or a tuple of such), y whatever the loss takes.

        Returns the output head's mean loss of the minibatch `lag` steps ago: of this one for synchronous methods, of
        the one 2S steps ago for the others, and None before that one exists.
        """
        self._refuse_if_broken()
        loads = self._loads(x, y)
        n = self._entered
        with self._running(f"step {n}"):
            self._change_phase(n)
            self._emulator.step(n, loads)
        self._entered += 1
        self._drained = False
        self._collect_losses()
        parts = self._losses.pop(n - self.lag, None)
        return None if parts is None else add_up(parts)  # only now does the host wait for the device

    def flush(self) -> list[float]:
        """Finish what is in flight. Returns, in order, the losses that `step` has not returned yet.

        Should training go on, later steps return them in their turn: collect from `step`, or from the last `flush`.
        """
        self._refuse_if_broken()
        if not self._drained:
            with self._running("flush"):
                self._emulator.drain(self._entered)
            self._drained = True
            self._collect_losses()
        return [add_up(self._losses[n]) for n in sorted(self._losses)]

    @property
    def _emulator(self) -> Emulator:
        return self._phase.emulator

    def _change_phase(self, n: int) -> None:
        phase = self._phases[self.method.phases.synchronous(n)]
        if phase is not self._phase:
            if not self._drained:
                self._emulator.drain(n)
                self._drained = True
                self._collect_losses()
            self._phase.end()
            phase.begin(n)
            self._phase = phase

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        before, idle = [stage.updates for stage in self._stages], not self._emulator.values
        try:
            with torch.enable_grad(), PreservedGenerator(self.device):
                yield
        except BaseException as error:
            if idle and before == [stage.updates for stage in self._stages]:
                for stage in self._stages:  # nothing was in flight, nothing was updated: as if it had not been tried
                    stage.abandon()
                self._emulator.restart(self._entered)
            else:
                self._broken = f"{what} was cut short by {type(error).__name__}: {error}"
            raise

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise StrettoError(
                f"training cannot go on: {self._broken}. Some stages have finished that minibatch and others have not; "
                "go on from a checkpoint (trainer.load), or make a new Trainer"
            )

    def _loads(self, x: Batch, y: Any) -> list[dict[str, Any]]:
        inputs, target = self.precision.inputs(inputs_on(x, self.device)), target_on(y, self.device)
        pieces = self.schedule.per_turn
        if pieces == 1:
            return [{"activation": inputs, "target": Target(target)}]
        examples = inputs[0].shape[0]
        if examples < pieces:
            raise UsageError(
                f"{examples} examples cannot be cut into {pieces} micro-batches: use larger minibatches, fewer "
                "microbatches=, or a loader that drops the last, short batch (DataLoader(..., drop_last=True))"
            )
        return [
            {"activation": x_part, "target": Target(y_part, x_part[0].shape[0] / examples)}
            for x_part, y_part in zip(micro_batches(inputs, pieces), micro_batches(target, pieces), strict=True)
        ]

    def _collect_losses(self) -> None:
        pieces, values = self.schedule.per_turn, self._emulator.values
        while self._finished < self._entered:
            edges = [self.rules.loss(self._finished * pieces + piece) for piece in range(pieces)]
            if not all(edge in values for edge in edges):
                return
            self._losses[self._finished] = [values.pop(edge) for edge in edges]
            self._finished += 1

    # -- using what was trained -------------------------------------------------------------------------------------

    @property
    def model(self) -> Chain:
        """The trained stages as one nn.Sequential: plain PyTorch from here on, without auxiliary heads."""
        return Chain(*self.stages)

    def evaluate(self, batches: Iterable[tuple[Batch, Any]]) -> dict[str, float]:
        """Mean loss over the examples of `batches`, with the current weights; drains nothing.

        With whole-numbered targets one dimension short of the output, "accuracy" is the share of them that the
        output's largest entry hits; without such targets there is no such key. Raises UsageError without examples.
        """
        return evaluate(self.model, self.loss, batches, self.device, self.precision)

    def observe(self, minibatches: int = 2) -> Observer:
        """Measure what the next minibatches see and what stages hold, while `step` trains as it does without.

        Figures are those of the steady state from minibatch 2 `schedule.drain` + 1 on. The result has `done` and
        `figures()`.
        """
        return Observer(self._emulator, self._entered, minibatches)

    def gather(self) -> dict[str, Tensor] | None:
        """The trained weights under the keys of `model.state_dict()`, and those of heads as `heads.<s>.<name>`.

        On one process that is all there is to gather; on processes the result is on rank 0, None elsewhere.
        """
        state: dict[str, Tensor] = dict(self.model.state_dict())
        for index, head in enumerate(self.heads):
            if head is not None:
                state.update({f"heads.{index}.{name}": value for name, value in head.state_dict().items()})
        return state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything training needs to go on; drains first. The folder appears whole or not at all.

        A checkpoint that was there is replaced; if that fails (UsageError, OSError) it is still there.
        """
        self.flush()
        manifest = Manifest(
            method=str(self.method),
            seed=self.seed,
            precision=self.precision.name,
            entered=self._entered,
            losses={n: [float(loss) for loss in losses] for n, losses in self._losses.items()},
        )
        write(path, (stage.state_dict() for stage in self._stages), manifest)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from `save`; what is in flight is dropped.

        Raises UsageError, and changes nothing, if a file is damaged or missing, or if it is of other stages, another
        seed or precision, or a method that is another or written otherwise.
        """
        manifest = read_manifest(path)
        own = {"method": str(self.method), "seed": self.seed, "precision": self.precision.name}
        for what, mine in own.items():
            if getattr(manifest, what) != mine:
                raise UsageError(
                    f"{path} was saved with {what} {getattr(manifest, what)}, this trainer has {what} {mine}"
                )
        if len(manifest.stages) != len(self._stages):
            raise UsageError(f"{path} holds {len(manifest.stages)} stages, this trainer has {len(self._stages)}")
        states = [read_stage(path, index) for index in range(len(self._stages))]
        before = copy.deepcopy([stage.state_dict() for stage in self._stages])
        try:
            for stage, saved in zip(self._stages, states, strict=True):
                stage.load_state_dict(saved, str(path))
        except UsageError:
            for stage, former in zip(self._stages, before, strict=True):
                stage.load_state_dict(former, "the state before")
            raise
        self._entered = manifest.entered
        self._finished = self._entered
        self._losses = {n: list(torch.tensor(losses, dtype=torch.float64)) for n, losses in manifest.losses.items()}
        self._drained, self._broken = True, None
        self._emulator.restart(self._entered)

    # -- construction -----------------------------------------------------------------------------------------------

    def _heads(self, given: Sequence[nn.Module | None] | None, example: Batch | None) -> list[nn.Module | None]:
        reach = self.rules.reach
        heads = [None if head is None else head.to(self.device) for head in check_heads(given, reach)]
        missing = [stage for stage in reach.heads[:-1] if heads[stage] is None]
        if missing and example is None:
            example = example_for_linear(self.stages)
            if example is None:
                raise UsageError(
                    f"method {self.method} needs heads after stages {missing}, and their shapes are not known: give "
                    "the Trainer one input batch, example=x, or the heads themselves, heads=[...]"
                )
        if example is None:
            return heads
        outputs = trace(self.stages, example, self.device)
        for stage in missing:
            cpu = torch.device("cpu")  # the same weights on every device
            with cpu, PreservedGenerator(cpu) as generator:
                generator.seed(derive(self.seed, "head", stage))
                head = head_kinds.build(self.method.head, stage, outputs[stage], outputs[-1][0])
            heads[stage] = head.to(device=self.device, dtype=outputs[stage][0].dtype)
        return heads

    def _plan(self, plan: Callable[..., tuple[Schedule, Rules]], workers: int | None) -> tuple[Schedule, Rules]:
        return plan(len(self.stages), workers, reduce=self.clip is not None, ties=ties.pairs(self._ties))

    def _make_phases(self, workers: int | None) -> dict[bool, Phase]:
        # By whether they are synchronous phases of a method that otherwise is not.
        own, synchronous = zip(*self._practices, strict=True)
        emulator = Emulator(self.schedule, self.rules, self._stages, self._delays)
        phases = {False: Phase(emulator, self._stages, own)}
        if self.method.phases:
            schedule, rules = self._plan(self.method.synchronous_plan, workers)
            phases[True] = Phase(Emulator(schedule, rules, self._stages), self._stages, synchronous)
        return phases

    def _stage(self, index: int, optimizer: Callable[..., Any], scheduler: Callable[..., Any] | None) -> Stage:
        module, head = self.stages[index], self.heads[index]
        parts = [part for part in (module, head) if part is not None]
        borrows = ties.borrower_of(self._ties, index, module)
        trainable = list(dict.fromkeys(p for part in parts for p in part.parameters() if p.requires_grad))
        parameters = trainable if borrows is None else borrows.own(trainable)
        masters = self.precision.masters(parts, parameters)
        made = build_optimizer(optimizer, [masters.copies.get(p, p) for p in parameters]) if parameters else None
        if made is not None:
            masters.check(made)
        delay, recompute = self._delays.steady[index], self._delays.recompute[index]
        place = Place(index, len(self.stages), delay, momentum_of(made), recompute)
        if made is not None:
            self._places.append(place)
        base = derive(self.seed, "forward", index)
        generator = PreservedGenerator(self.device)
        with nullcontext() if borrows is None else borrows.worn(borrows.fixed()):
            autocast = self.precision.name == "bf16-autocast"
            practices = build_practices(
                self.method, module, made, place, masters, scheduler=scheduler, autocast=autocast, clip=self.clip
            )
        self._practices.append(practices)
        return Stage(
            index,
            module,
            reach=self.rules.reach,
            weights=practices[0].weights,
            loss=self.precision.loss(self.loss),
            head=head,
            optimizer=made,
            scheduler=build_scheduler(scheduler, made) if scheduler is not None and made is not None else None,
            split=index in self.rules.split,
            recompute=index in self.rules.recompute,
            mean=self.method.combine == "mean",
            seed_forward=lambda microbatch: generator.seed(derive(base, microbatch)),
            lends=ties.lender_of(self._ties, index),
            borrows=borrows,
            masters=masters,
            context=lambda: self.precision.forward(self.device),
        )


def add_up(losses: list[Tensor]) -> float:
    """The loss of a minibatch from those of its micro-batches, which carry their shares."""
    return sum(float(loss) for loss in losses)
