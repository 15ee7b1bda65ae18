"""Builds what a Trainer trains with. Mistakes in its arguments are found here, before anything is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads import LocalLoss
from stretto.heads.head import Network, Site, TrainedLoss
from stretto.heads.man import LOW_PRECISION
from stretto.heads.table import build_head_at, readings, sharing
from stretto.losses import MeanOverExamples
from stretto.mesh import Placement
from stretto.methods import Method, method
from stretto.methods.advice import advised
from stretto.methods.table import is_advised
from stretto.nn import deferred, memory_limit, tied_weights
from stretto.nn.batch import arguments_of, inputs_on
from stretto.nn.deferred import RemoteStage
from stretto.nn.group_norm import has_batch_norm
from stretto.nn.layer_recompute import check_marked
from stretto.nn.seeding import PreservedGenerator, derive
from stretto.nn.shapes import example_for_linear
from stretto.optim.by_name import name_made_by
from stretto.optim.muon_with_adamw import check_used
from stretto.optim.parameter_labels import head_labels, stage_labels, takes_labels
from stretto.options.import_object import is_function
from stretto.schedule import Delays, Rules, Schedule
from stretto.stage.build import BuiltStage, StageBuilder
from stretto.stage.interpreter import Interpreter
from stretto.stage.phase_settings import warn_of_overshoot
from stretto.stage.stage import PhaseSettings
from stretto.stage.trainer_arguments import (
    Specification,
    StageLike,
    build_stage,
    check_heads,
    check_prediction,
    check_sharing,
    check_stage,
    check_stepped,
    lazy_name,
    refuse_lazy,
    refuse_meta,
    wholly_in_evaluation,
)
from stretto.trainer.backend import Backend, InterpreterPlan
from stretto.trainer.microbatches import MinibatchSplitter


@dataclass(frozen=True)
class Phase:
    """The interpreter of the phase's schedule, and the settings of each of its stages, in the interpreter's order."""

    interpreter: Interpreter
    settings: Sequence[PhaseSettings]

    def begin(self, n: int) -> None:
        """Begin the phase at turn n, with nothing in flight."""
        for stage, settings in zip(self.interpreter.every_stage, self.settings, strict=True):
            stage.apply_phase(settings, stage.index in self.interpreter.rules.recompute)
        self.interpreter.restart(n)

    def end(self) -> None:
        """End the phase: its observer sees no more."""
        self.interpreter.watch = None


class Construction:
    """Builds the stages of this process: `replicas` has a dict (index -> Stage) for each replica that lives here.

    `phases` run them: key True is the synchronous phase of an otherwise asynchronous method, False the method's own.
    `splitter` gives them their examples. `merges`: replicas differ between merges of their weights;
    `summed_replicas` is then the number of replicas whose mean losses are added up, else 1.
    """

    def __init__(
        self,
        of: Specification,
        backend: Backend,
        given: Sequence[StageLike],
        example: Any,
        heads: Sequence[nn.Module | None] | None,
        workers: int | None,
    ) -> None:
        self._of = of
        self._backend = backend
        num_stages = len(given)
        workers = backend.workers(workers, num_stages)
        backend.agree(self._description(num_stages), of.device)
        backend.calibrate(of.sync)
        check_prediction(of, num_stages)
        known = self._build(given, of.method.homes(num_stages, workers))
        self._agreement = of.sync.agreement if of.mesh.data > 1 or of.sync.agreement != "A" else None
        self.merges = self._agreement not in (None, "A")
        self.summed_replicas = of.mesh.data if self.merges else 1
        check_marked(known, of.recompute)
        self._shared = sharing(of.method.head, of.method.reach(num_stages), heads, known)
        self._ties = self._tied(known)
        self._readings = readings(of.method.head, of.method.reach(num_stages), heads, known)
        self._check_reading(known)
        self._labels = stage_labels(known) if takes_labels(of.optimizer) else {}  # while parameters are whole
        self._all_known = not any(isinstance(stage, RemoteStage) for stage in known)
        self._share_stages()
        self.weight_bytes = self._weight_bytes(known)
        self.schedule, self.rules = self._plan(of.method.plan, workers)
        self.lag = of.method.lag(num_stages) + of.sync.lag(of.mesh.data)
        self.placement = Placement(of.mesh, self.schedule.num_workers)
        self.heads = self._heads(heads, example, given, known)
        self._hold_loss()
        check_sharing(known, self.heads, {id(p) for borrowed in (self._shared or {}).values() for p in borrowed})
        self._labels |= head_labels(self.heads) if self._labels else {}
        self._check_losses()
        self.in_evaluation = wholly_in_evaluation(known)
        backend.share([*self.stages, *self.heads])
        backend.shard(self.stages, self.heads, of.sync, of.device)
        practices = self._make_stages()
        self.phases = self._make_phases(practices, workers)
        self.splitter = self._make_splitter()

    def _description(self, num_stages: int) -> dict[str, Any]:
        return {
            "stretto": version("stretto"),
            "torch": torch.__version__,
            "method": str(self._of.method),
            "stages": num_stages,
            "seed": self._of.seed,
            "precision": self._of.precision.name,
            "clip": self._of.clip,
            "mesh": self._of.mesh.to_json(),
            "sync": str(self._of.sync),
            "recompute": self._of.recompute,
        }

    def _build(self, given: Sequence[StageLike], homes: Mapping[int, int]) -> list[nn.Module]:
        # Stages of other processes are known here only if they were given as modules.
        known: list[nn.Module] = []
        self.stages: list[nn.Module] = []
        for index, stage in enumerate(given):
            check_stage(stage, index)
            remote = RemoteStage(index, homes[index])
            here = self._backend.holds(homes[index])
            known.append(build_stage(stage, index, self._of.seed) if here or isinstance(stage, nn.Module) else remote)
            if here:
                deferred.fill(known[-1])
            self.stages.append(known[-1].to(self._of.device) if here else remote)
        return known

    def _tied(self, known: Sequence[nn.Module]) -> Sequence[tied_weights.Tied]:
        method = self._of.method
        local = method.reach(len(known)).heads[:-1]
        ties = tied_weights.find(known, last_owns=bool(local) and not method.synchronous, heads=self._shared)
        if ties and (self.merges or self._of.sync.sharding):
            first = ties[0]
            if self._shared:
                raise UsageError(
                    f"method {method}: heads share the weights of stage {first.owner}, which {self._of.sync} does not "
                    "keep whole, or the same on all replicas: use sync='all-reduce', or another head"
                )
            raise UsageError(
                f"stages {first.owner} and {first.users[0]} share {first.name!r} (tied weights), which {self._of.sync} "
                "does not keep the same on both: use sync='all-reduce', or put both into one stage"
            )
        return ties

    def _weight_bytes(self, known: Sequence[nn.Module]) -> dict[tuple[int, int], float]:
        # Of the weights that one stage sends another, by (owner, user).
        sizes: dict[tuple[int, int], float] = {}
        for tied in self._ties:
            sent = memory_limit.bytes_of([tied.parameter])
            for user in tied.users:
                sizes[tied.owner, user] = sizes.get((tied.owner, user), 0.0) + sent
        for owner, reader, _ in self._readings.readers:
            read = memory_limit.bytes_of(self._readings.lent(owner, known[owner]).values())
            sizes[owner, reader] = sizes.get((owner, reader), 0.0) + read
        return sizes

    def _check_reading(self, known: Sequence[nn.Module]) -> None:
        reads = self._readings
        if not reads.readers or reads.kind is None:
            return
        owners = {owner: reads.lent(owner, known[owner]) for owner, _, _ in reads.readers}
        read = {(id(parameter), owner) for owner, lent in owners.items() for parameter in lent.values()}
        for tied in self._ties:
            if any(number == id(tied.parameter) and owner != tied.owner for number, owner in read):
                raise UsageError(
                    f"head {reads.head!r} reads {reads.kind.what}, but stages {tied.owner} and {tied.users[0]} share "
                    f"{tied.name!r} (tied weights), which stage {tied.owner} trains: use head='auto'"
                )
        pairs = tied_weights.pairs(self._ties)
        for owner, reader, every in reads.readers:
            if every > 1 and (owner, reader) in pairs:
                raise UsageError(
                    f"head {reads.head!r}, every={every}: stages {owner} and {reader} share a weight (tied weights), "
                    "whose versions come after each update: use every=1"
                )
        if reads.kind.averages and self._of.precision.converts and reads.options.get("momentum"):
            raise UsageError(f"head {reads.head!r}, precision={self._of.precision.name!r}: {LOW_PRECISION}")
        if self._of.method.recompute:
            raise UsageError(
                f"method {self._of.method}: a forward that is run again would read newer weights of {reads.kind.what} "
                f"than it did; leave recompute= out, or take another head than {reads.head!r}"
            )
        if self.merges or self._of.sync.sharding:
            raise UsageError(
                f"head {reads.head!r} reads {reads.kind.what}, but {self._of.sync} does not keep these weights whole, "
                "or the same on all replicas: use sync='all-reduce', or another head"
            )

    def _share_stages(self) -> None:
        # Prepares each stage for the processes that share it.
        tied = frozenset(tie.parameter for tie in self._ties)
        for index, stage in enumerate(self.stages):
            if not isinstance(stage, RemoteStage):
                last = index == len(self.stages) - 1
                self._backend.sharing.prepare(stage, first=index == 0, last=last, tied=tied)

    def _heads(
        self,
        given: Sequence[nn.Module | None] | None,
        example: Any,
        stages: Sequence[StageLike],
        known: Sequence[nn.Module],
    ) -> list[nn.Module | None]:
        reach = self.rules.reach
        heads = check_heads(given, reach)
        missing = [stage for stage in sorted({*reach.heads[:-1], *reach.predicted}) if heads[stage] is None]
        if missing and example is None:
            example = self._example(stages)
            if example is None:
                raise UsageError(
                    f"method {self._of.method} needs heads after stages {missing}, and their shapes are not known: "
                    "give the Trainer one input batch, example=x, or the heads themselves, heads=[...]"
                )
        if example is not None:
            own = is_function(self._of.method.head)  # of the user's, who knows what the loss takes
            outputs = self._backend.trace(self.stages, example, self._of.device, any_output=own or not missing)
            network = Network(known, outputs, inputs_on(example, self._of.device), shared=self._of.mesh.inside > 1)
            for stage in missing:
                cpu = torch.device("cpu")  # the same weights on every device
                with cpu, PreservedGenerator(cpu) as generator:
                    generator.seed(derive(self._of.seed, "head", stage))
                    at = Site(stage, outputs[stage], outputs[-1][0], network, reach.labelled)
                    head = build_head_at(self._of.method.head, at, stage in reach.predicted)
                if self._shared is None:  # other stages' weights have their dtypes
                    head = head.to(dtype=outputs[stage][0].dtype)
                heads[stage] = head
        heads_here = [
            head.to(self._of.device) if head is not None and not isinstance(stage, RemoteStage) else None
            for head, stage in zip(heads, self.stages, strict=True)
        ]
        refuse_lazy(stage for stage in self.stages if not isinstance(stage, RemoteStage))
        for index, head_here in enumerate(heads_here):
            if head_here is not None:
                if name := lazy_name(head_here):
                    raise UsageError(
                        f"heads[{index}]: {name} is lazy and has no shape yet: call the head once on stage {index}'s "
                        "output before"
                    )
                self._backend.sharing.prepare_head(head_here)
        return heads_here

    def _hold_loss(self) -> None:
        # A loss with parameters is held by the last stage, in the place of a head.
        loss, last, method = self._of.loss, len(self.stages) - 1, self._of.method
        loss = loss.loss if isinstance(loss, MeanOverExamples) else loss
        if not isinstance(loss, nn.Module) or not any(each.requires_grad for each in loss.parameters()):
            return
        refuse_meta(loss, "loss")
        if name := lazy_name(loss):
            raise UsageError(f"loss: {name} is lazy and has no shape yet: call the loss once on an output before")
        remedy = "use a synchronous method, or a loss without parameters"
        if self.rules.reach.heads != (last,):
            raise UsageError(
                f"method {method}: the loss has parameters, which are trained with the last stage, but stages "
                f"{list(self.rules.reach.heads)} all have a loss: {remedy}"
            )
        if method.delays(self.schedule).mean[last]:
            raise UsageError(
                f"method {method}: the loss has parameters, and the last stage's weights are updated between a forward "
                f"and its backward, which no versions of the loss's are kept for: {remedy}"
            )
        if self._of.mesh.inside > 1 or self._of.sync.sharding:
            raise UsageError(
                f"{self._of.mesh}, {self._of.sync}: the loss has parameters, and several processes share the last "
                "stage: use tensor=1, space=(1, 1) and sync='all-reduce', or a loss without parameters"
            )
        if not isinstance(self.stages[last], RemoteStage):
            self.heads[last] = TrainedLoss(loss).to(self._of.device)

    def _check_losses(self) -> None:
        with_losses = [stage for stage, head in enumerate(self.heads) if isinstance(head, LocalLoss)]
        if with_losses and self._of.sync.sharding:
            raise UsageError(
                f"the heads of stages {with_losses} have losses of their own, which need their weights outside a "
                f"forward, and {self._of.sync} has whole weights in a forward only: use sync='all-reduce', or other "
                "heads"
            )

    def _example(self, stages: Sequence[StageLike]) -> Tensor | None:
        # With several processes, a stage given as a function is built in one of them only.
        if any(isinstance(stage, RemoteStage) for stage in self.stages):
            modules = [stage for stage in stages if isinstance(stage, nn.Module)]
            return example_for_linear(modules) if len(modules) == len(stages) else None
        return example_for_linear(self.stages)

    def _plan(self, plan: Callable[..., tuple[Schedule, Rules]], workers: int | None) -> tuple[Schedule, Rules]:
        pairs = tied_weights.pairs(self._ties)
        action = None if self._agreement is None else self._of.sync.action
        reduce, reads = self._of.clip is not None, self._readings.readers
        return plan(len(self.stages), workers, reduce=reduce, ties=pairs, reads=reads, agreement=action)

    def _make_stages(self) -> list[tuple[PhaseSettings, PhaseSettings]]:
        self._delays = self._of.method.delays(self.schedule)
        first_builder = StageBuilder(
            specification=self._of,
            rules=self.rules,
            delays=self._delays,
            ties=self._ties,
            sharing=self._backend.sharing,
            readings=self._readings,
            labels=self._labels,
        )
        stages_here = [index for index, stage in enumerate(self.stages) if not isinstance(stage, RemoteStage)]
        builders = [first_builder.of_replica(self._backend.replicas[0], self._ties)]
        parts = [(self.stages, self.heads)]
        copies = len(self._backend.replicas) - 1
        memory_limit.refuse_more(
            copies * memory_limit.size_of([*self.stages, *self.heads]),
            f"data={copies + 1}: {copies} copies of the stages for emulated replicas need",
            "choose fewer replicas, or processes of their own (--workers)",
        )
        for replica in self._backend.replicas[1:]:  # only emulated replicas
            parts.append(deferred.deep_copy(parts[0]))
            builders.append(first_builder.of_replica(replica, tied_weights.of_copies(self._ties, parts[-1][0])))
        built: list[BuiltStage] = []
        for index in stages_here:
            reducer = None if self._agreement is None else self._backend.reducer(self._of.sync)
            for builder, (stages, heads) in zip(builders, parts, strict=True):
                built.append(builder.build(index, stages[index], heads[index], reducer))
        self._check_optimizers(built, parts)
        check_used([stage.optimizer for stage, *_ in built], self._labels.values(), all_known=self._all_known)
        warn_of_overshoot(self._of.method, [place for stage in built for place in stage.places])
        for stages, heads in parts:
            self._of.precision.convert([*stages, *heads])  # last, since nothing can be refused from here on
        self.replicas = [
            {built_stage.stage.index: built_stage.stage for built_stage in built[number :: len(parts)]}
            for number in range(len(parts))
        ]
        return [stage.phases for stage in built]

    def _check_optimizers(self, built: Sequence[BuiltStage], parts: Sequence[tuple[Any, Any]]) -> None:
        holders: dict[int, set[tuple[int, int]]] = {}
        for replica, modules in enumerate(parts):
            for of_stages in modules:
                for index, module in enumerate(of_stages):
                    for parameter in () if module is None else module.parameters():
                        holders.setdefault(id(parameter), set()).add((replica, index))
        for number, (stage, *_) in enumerate(built):
            if stage.optimizer is not None:
                check_stepped(stage.optimizer, (number % len(parts), stage.index), holders)

    def _make_phases(
        self, settings: Sequence[tuple[PhaseSettings, PhaseSettings]], workers: int | None
    ) -> dict[bool, Phase]:
        # The key is whether the phase is the synchronous one of a method that otherwise is not.
        plans = [InterpreterPlan(self.schedule, self.rules, self._delays)]
        if self._of.method.phases:
            schedule, rules = self._plan(self._of.method.synchronous_plan, workers)
            plans.append(InterpreterPlan(schedule, rules, Delays(schedule)))
        lag = self._of.method.lag(len(self.stages))
        interpreters = self._backend.interpreters(plans, self.replicas, lag, self._of.device)
        phases = zip((False, True), interpreters, zip(*settings, strict=True), strict=False)
        return {synchronous: Phase(interpreter, of_stages) for synchronous, interpreter, of_stages in phases}

    def _make_splitter(self) -> MinibatchSplitter:
        stages_here = self.replicas[0]
        head_reads_x = any(isinstance(head, LocalLoss) for head in self.heads)
        return MinibatchSplitter(
            self._of,
            self.schedule,
            own=self._backend.replicas,
            merges=self.merges,
            reads_x=0 in stages_here or head_reads_x,
            reads_y=any(stage in stages_here for stage in self.rules.reach.reading),
            head_reads_x=head_reads_x,
            arguments=arguments_of(self.stages[0]) if 0 in stages_here else None,
        )


def chosen_method(asked: str | Method, optimizer: Callable[..., Any], stages: Sequence[Any]) -> Method:
    """The method, for this optimizer function and these stages."""
    if not is_advised(asked):
        return method(asked)
    return settled(asked, name_made_by(optimizer, stages), stages)


def settled(asked: str | Method, optimizer: str, stages: Sequence[Any]) -> Method:
    """The method, under an optimizer of this name: what `advised` says of these stages."""
    return advised(asked, optimizer, len(stages), whole=has_batch_norm(stages))


def refuse_hidden_norms(chosen: Method, pieces: int, stages: Sequence[Any]) -> None:
    """Raise UsageError where the method was chosen before it was known that stages, given as functions, have norms."""
    if chosen.advice is not None and not chosen.advice.whole and pieces > 1 and has_batch_norm(stages):
        raise UsageError(
            f"stages that are given as functions have batch norms, which normalise each of {pieces} micro-batches by "
            "itself: give stages as modules, so that the advice knows"
        )
