"""How a Trainer comes of what it was given: whatever can be wrong is found out here, before anything is trained."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads import LocalLoss
from stretto.heads import build as build_head
from stretto.heads.head import Network
from stretto.heads.solo import readings
from stretto.mesh import Placement
from stretto.nn import memory_limit, tied_weights
from stretto.nn.batch import inputs_on
from stretto.nn.remote_stage import RemoteStage
from stretto.nn.seeding import PreservedGenerator, derive
from stretto.nn.shapes import example_for_linear
from stretto.schedule import Delays, Rules, Schedule
from stretto.stage.arguments import (
    StageLike,
    arguments_of,
    build_stage,
    check_heads,
    check_sharing,
    check_stage,
    refuse_lazy,
    wake,
)
from stretto.stage.build import BuiltStage, StageBuilder
from stretto.stage.practice import warn_of_overshoot
from stretto.stage.specification import Specification
from stretto.stage.stage import PhaseSettings
from stretto.trainer.backend import Backend, InterpreterPlan
from stretto.trainer.microbatches import MinibatchSplitter
from stretto.trainer.phase import Phase


class Construction:
    """Makes what trains the stages of this process: `replicas`, one dict (index -> Stage) for each that lives here.

    `phases` run them; the key is whether the phase is the synchronous one of a method that otherwise is not.
    `splitter` gives them their examples. `merges`: replicas differ between merges of their weights;
    `summed_replicas` is then the number of replicas whose mean losses are added up, else 1.
    """

    def __init__(
        self,
        of: Specification,
        backend: Backend,
        given: Iterable[StageLike],
        *,
        example: Any,
        heads: Sequence[nn.Module | None] | None,
        workers: int | None,
    ) -> None:
        self._of = of
        self._backend = backend
        given = list(given)
        num_stages = len(given)
        if not num_stages:
            raise UsageError("stages is empty: give at least one nn.Module")
        if workers is not None and not 1 <= workers <= num_stages:
            raise UsageError(f"workers={workers} for {num_stages} stages: choose between 1 and {num_stages}")
        workers = backend.workers(workers, num_stages)
        backend.agree(self._description(num_stages), of.device)
        backend.calibrate(of.sync)
        known = self._build(given, of.method.homes(num_stages, workers))
        self._agreement = of.sync.agreement if of.mesh.data > 1 or of.sync.agreement != "A" else None
        self.merges = self._agreement not in (None, "A")
        self.summed_replicas = of.mesh.data if self.merges else 1
        self._ties = self._tied(known)
        self._reads = readings(of.method.head, of.method.reach(num_stages), heads)
        self._check_reading()
        self._share_stages()
        self.schedule, self.rules = self._plan(of.method.plan, workers)
        self.lag = of.method.lag(num_stages) + of.sync.lag(of.mesh.data)
        self.placement = Placement(of.mesh, self.schedule.num_workers)
        self.heads = self._heads(heads, example, given, known)
        check_sharing(known, self.heads)
        self._check_losses()
        wake(known)
        backend.share([*self.stages, *self.heads])
        backend.shard([*self.stages, *self.heads], of.sync, of.device)
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
        }

    def _build(self, given: Sequence[StageLike], homes: Mapping[int, int]) -> list[nn.Module]:
        # Stages that live in other processes are known here only if they were given as modules.
        known: list[nn.Module] = []
        self.stages: list[nn.Module] = []
        for index, stage in enumerate(given):
            check_stage(stage, index)
            elsewhere = RemoteStage(index, homes[index])
            here = self._backend.holds(homes[index])
            known.append(
                build_stage(stage, index, self._of.seed) if here or isinstance(stage, nn.Module) else elsewhere
            )
            self.stages.append(known[-1].to(self._of.device) if here else elsewhere)
        return known

    def _tied(self, known: Sequence[nn.Module]) -> Sequence[tied_weights.Tied]:
        found = tied_weights.find(known)
        if found and (self.merges or self._of.sync.sharding):
            first = found[0]
            raise UsageError(
                f"stages {first.owner} and {first.users[0]} share {first.name!r} (tied weights), which {self._of.sync} "
                "does not keep the same on both: use sync='all-reduce', or put both into one stage"
            )
        return found

    def _check_reading(self) -> None:
        if self._reads and self._ties:
            first = self._ties[0]
            raise UsageError(
                f"head 'solo' reads the last stage's readout, but stages {first.owner} and {first.users[0]} share "
                f"{first.name!r} (tied weights), which stage {first.owner} trains: use head='auto'"
            )
        if self._reads and self._of.method.recompute:
            raise UsageError(
                f"method {self._of.method}: a forward that is run again would read a newer readout than it did; leave "
                "recompute= out, or take another head than 'solo'"
            )
        if self._reads and (self.merges or self._of.sync.sharding):
            raise UsageError(
                f"head 'solo' reads weights of the last stage, of which {self._of.sync} leaves no whole, or no newest, "
                "version: use sync='all-reduce', or another head"
            )

    def _share_stages(self) -> None:
        # Among the processes of a worker, where it has several.
        tied = frozenset(each.parameter for each in self._ties)
        for index, stage in enumerate(self.stages):
            if not isinstance(stage, RemoteStage):
                last = index == len(self.stages) - 1
                self._backend.within.prepare(stage, first=index == 0, last=last, tied=tied)

    def _heads(
        self,
        given: Sequence[nn.Module | None] | None,
        example: Any,
        stages: Sequence[StageLike],
        known: Sequence[nn.Module],
    ) -> list[nn.Module | None]:
        reach = self.rules.reach
        heads = check_heads(given, reach)
        missing = [stage for stage in reach.heads[:-1] if heads[stage] is None]
        if missing and example is None:
            example = self._example(stages)
            if example is None:
                raise UsageError(
                    f"method {self._of.method} needs heads after stages {missing}, and their shapes are not known: "
                    "give the Trainer one input batch, example=x, or the heads themselves, heads=[...]"
                )
        if example is not None:
            outputs = self._backend.trace(self.stages, example, self._of.device)
            network = Network(known, outputs, inputs_on(example, self._of.device), shared=self._of.mesh.inside > 1)
            for stage in missing:
                cpu = torch.device("cpu")  # the same weights on every device
                with cpu, PreservedGenerator(cpu) as generator:
                    generator.seed(derive(self._of.seed, "head", stage))
                    head = build_head(self._of.method.head, stage, outputs[stage], outputs[-1][0], network)
                heads[stage] = head.to(dtype=outputs[stage][0].dtype)
        own = [
            head.to(self._of.device) if head is not None and not isinstance(stage, RemoteStage) else None
            for head, stage in zip(heads, self.stages, strict=True)
        ]
        refuse_lazy(stage for stage in self.stages if not isinstance(stage, RemoteStage))
        for built in own:
            if built is not None:
                self._backend.within.prepare_head(built)
        return own

    def _check_losses(self) -> None:
        own = [stage for stage, head in enumerate(self.heads) if isinstance(head, LocalLoss)]
        if own and self._of.sync.sharding:
            raise UsageError(
                f"the heads of stages {own} have losses of their own, which need their weights outside a forward, and "
                f"{self._of.sync} has whole weights in a forward only: use sync='all-reduce', or other heads"
            )

    def _example(self, stages: Sequence[StageLike]) -> Tensor | None:
        # On several processes a stage that is given as a function is seen by one of them only.
        if any(isinstance(stage, RemoteStage) for stage in self.stages):
            modules = [stage for stage in stages if isinstance(stage, nn.Module)]
            return example_for_linear(modules) if len(modules) == len(stages) else None
        return example_for_linear(self.stages)

    def _plan(self, plan: Callable[..., tuple[Schedule, Rules]], workers: int | None) -> tuple[Schedule, Rules]:
        pairs = tied_weights.pairs(self._ties)
        action = None if self._agreement is None else self._of.sync.action
        return plan(
            len(self.stages), workers, reduce=self._of.clip is not None, ties=pairs, reads=self._reads, agreement=action
        )

    def _make_stages(self) -> list[tuple[PhaseSettings, PhaseSettings]]:
        self._delays = self._of.method.delays(self.schedule)
        first = StageBuilder(
            specification=self._of,
            rules=self.rules,
            delays=self._delays,
            ties=self._ties,
            sharing=self._backend.within,
            read=bool(self._reads),
        )
        mine = [index for index, stage in enumerate(self.stages) if not isinstance(stage, RemoteStage)]
        builders = [first.of_replica(self._backend.replicas[0], self._ties)]
        parts = [(self.stages, self.heads)]
        copies = len(self._backend.replicas) - 1
        memory_limit.refuse_more(
            copies * memory_limit.size_of([*self.stages, *self.heads]),
            f"data={copies + 1}: {copies} copies of the stages for emulated replicas need",
            "choose fewer replicas, or processes of their own (--workers)",
        )
        for replica in self._backend.replicas[1:]:  # emulated ones
            parts.append(copy.deepcopy(parts[0]))
            builders.append(first.of_replica(replica, tied_weights.find(parts[-1][0])))
        built: list[BuiltStage] = []
        for index in mine:
            peers = None if self._agreement is None else self._backend.peers(self._of.sync)
            for builder, (stages, heads) in zip(builders, parts, strict=True):
                built.append(builder.build(index, stages[index], heads[index], peers))
        warn_of_overshoot(self._of.method, [stage.place for stage in built if stage.place is not None])
        for stages, heads in parts:
            self._of.precision.convert([*stages, *heads])  # only now that nothing can be refused any more
        self.replicas = [
            {made.stage.index: made.stage for made in built[number :: len(parts)]} for number in range(len(parts))
        ]
        return [made.phases for made in built]

    def _make_phases(
        self, practices: Sequence[tuple[PhaseSettings, PhaseSettings]], workers: int | None
    ) -> dict[bool, Phase]:
        # By whether they are synchronous phases of a method that otherwise is not.
        plans = [InterpreterPlan(self.schedule, self.rules, self._delays)]
        if self._of.method.phases:
            schedule, rules = self._plan(self._of.method.synchronous_plan, workers)
            plans.append(InterpreterPlan(schedule, rules, Delays(schedule)))
        lag = self._of.method.lag(len(self.stages))
        interpreters = self._backend.interpreters(plans, self.replicas, lag, self._of.device)
        both = zip((False, True), interpreters, zip(*practices, strict=True), strict=False)
        return {synchronous: Phase(interpreter, own) for synchronous, interpreter, own in both}

    def _make_splitter(self) -> MinibatchSplitter:
        here = self.replicas[0]
        tells_x = any(isinstance(head, LocalLoss) for head in self.heads)
        return MinibatchSplitter(
            self._of,
            self.schedule.per_turn,
            own=self._backend.replicas,
            merges=self.merges,
            reads_x=0 in here or tells_x,
            reads_y=any(head in here for head in self.rules.reach.heads),
            tells_x=tells_x,
            arguments=arguments_of(self.stages[0]) if 0 in here else None,
        )
