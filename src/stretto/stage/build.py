"""Builds a `Stage` from a module, a head and the specification of its Trainer: the only place that does."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.head import HeadReadings
from stretto.methods.cure import Place
from stretto.nn import tied_weights
from stretto.nn.hooks import refuse_hooks
from stretto.nn.seeding import ForwardSeeds, derive
from stretto.nn.sharded_modules import is_sharded
from stretto.nn.tied_weights import Lender
from stretto.optim import Masters
from stretto.optim.from_function import NamedOptimizer, build_optimizer, refuse_coupled
from stretto.optim.parameter_labels import Label, labelled, takes_labels
from stretto.optim.traits import check_shares, is_elementwise, momenta_of
from stretto.replicas.agreement import Agreement, agreement
from stretto.replicas.optimizer_share import OptimizerShare, Shares
from stretto.replicas.parameter_server.client import ServedAgreement, Servers
from stretto.replicas.reducer import ReplicaReducer
from stretto.schedule import Delays, Rules
from stretto.stage.gradient_predictor import GradientPredictor
from stretto.stage.intra_stage import StageSharing
from stretto.stage.phase_settings import build_phases, check_served, places_by_group
from stretto.stage.stage import PhaseSettings, Stage, StageParts
from stretto.stage.trainer_arguments import Specification, build_scheduler
from stretto.weights.weights import Sharded


class BuiltStage(NamedTuple):
    """A stage with its settings for each phase, and its `Place` for each group of its optimizer, if it has one."""

    stage: Stage
    phases: tuple[PhaseSettings, PhaseSettings]  # the method's own, and the synchronous one
    places: list[Place]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBuilder:
    """Builds the stages of one replica.

    `ties` are the parameters that several stages of this replica use, `sharing` is how processes share one stage.
    `labels` gives each parameter's purpose by its name in `Trainer.gather`; `readings` lists the weights that heads of
    other stages read.
    """

    specification: Specification
    rules: Rules
    delays: Delays
    ties: Sequence[tied_weights.Tied]
    sharing: StageSharing
    labels: Mapping[str, Label]
    readings: HeadReadings = field(default_factory=HeadReadings)
    replica: int = 0

    def of_replica(self, replica: int, ties: Sequence[tied_weights.Tied]) -> "StageBuilder":
        return replace(self, replica=replica, ties=ties)

    def build(
        self, index: int, module: nn.Module, head: nn.Module | None, reducer: ReplicaReducer | Servers | None = None
    ) -> BuiltStage:
        """Build stage `index`. Raises UsageError where the method cannot train it.

        `reducer` connects it with its copies in the other replicas; None without replicas.
        """
        specification = self.specification
        refuse_hooks(
            f"stage {index}",
            module,
            tied=[tie.parameter for tie in self.ties],
            per_update=self.rules.per_update,
            replicas=specification.mesh.data,
            stashed=specification.method.weights not in ("live", "current"),
        )
        parts = self._parts(index, module, head)
        optimizer = parts.optimizer
        place = self._place(index, optimizer)
        with nullcontext() if parts.borrows is None else parts.borrows.substituted(parts.borrows.placeholders()):
            phases = build_phases(specification, parts, place)
        if specification.sync.sharding is not None and is_sharded(module):
            split, per_update = index in self.rules.split, self.rules.per_update
            weights = Sharded(module, per_update, split=split, reshard=specification.sync.sharding.reshard)
            phases = (phases[0]._replace(weights=weights), phases[1])  # fully-shard has no other phases
        self._share_out(parts, reducer)
        stepped = [parts.masters.of(p) for p in trainable(parts)]
        parts.agreement = self._agreement(parts, stepped, reducer)
        parts.feedback = specification.method.cure.at(place).feedback
        if isinstance(parts.agreement, ServedAgreement):
            push = parts.agreement.step
            phases = (phases[0]._replace(step=lambda _: push()), phases[1]._replace(step=lambda _: push()))
        elif specification.scheduler is not None and optimizer is not None:
            parts.scheduler = build_scheduler(specification.scheduler, optimizer)
        stage = Stage(parts, specification, self.rules, phases[0])
        return BuiltStage(stage, phases, [] if optimizer is None else places_by_group(place, optimizer))

    def _parts(self, index: int, module: nn.Module, head: nn.Module | None) -> StageParts:
        # All but agreement and scheduler, which depend on the stage's settings.
        specification = self.specification
        predicted = head if index in self.rules.reach.predicted else None
        head = None if predicted is not None else head
        trained = {tie.owner for tie in self.rules.ties if tie.user == index and tie.trains}
        modules = [part for part in (module, head) if part is not None]
        parts = StageParts(
            index=index,
            module=module,
            head=head,
            lends=self._lends(index, module),
            borrows=tied_weights.borrower_of(self.ties, index, modules, trained),
            seeds=ForwardSeeds(specification.device, specification.seed, index, self.replica),
            predictor=None if predicted is None else self._predictor(index, predicted),
        )
        parameters = trainable(parts)
        parts.masters = specification.precision.masters(modules, parameters)
        parts.norms = self.sharing.norms(modules, parts.masters)
        if parameters:
            prefixes = ((f"{index}.", parts.module), (f"heads.{index}.", parts.head))
            parts.optimizer, parts.labels = self._optimizer(parameters, names_of(prefixes, parameters), parts.masters)
            self.sharing.check(parts.optimizer, index)
            check_shares(parts.optimizer, index)
        return parts

    def _optimizer(
        self, parameters: Sequence[nn.Parameter], names: Sequence[str], masters: Masters
    ) -> tuple[torch.optim.Optimizer, Sequence[Label]]:
        # The optimizer that the user's function makes, and the labels that it was given.
        make = self.specification.optimizer
        if isinstance(make, NamedOptimizer):
            make = make.named(names)
        labels = [self.labels[name] for name in names] if takes_labels(make) else []
        optimizer = build_optimizer(labelled(make, labels), [masters.copies.get(p, p) for p in parameters])
        masters.check(optimizer)
        if self.rules.num_stages > 1 or self.specification.sync.shares_optimizer:
            refuse_coupled(optimizer)
        return optimizer, labels

    def _predictor(self, index: int, module: nn.Module) -> GradientPredictor:
        specification, reach = self.specification, self.rules.reach
        prediction = specification.method.prediction
        assert prediction is not None, "the method says how predictions learn"
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        masters = specification.precision.masters([module], parameters)
        optimizer, scheduler = None, None
        if parameters:
            names = names_of(((f"heads.{index}.", module),), parameters)
            optimizer, _ = self._optimizer(parameters, names, masters)
            for group in optimizer.param_groups:
                for key in {"lr", "initial_lr"} & {*group}:  # a scheduler of the user's function has set the latter
                    group[key] = group[key] * prediction.rate
            if specification.scheduler is not None:
                scheduler = build_scheduler(specification.scheduler, optimizer)
        return GradientPredictor(
            module=module,
            optimizer=optimizer,
            scheduler=scheduler,
            masters=masters,
            seeds=ForwardSeeds(specification.device, derive(specification.seed, "prediction"), index, self.replica),
            labelled=reach.labelled,
            keeps_graph=prediction.keeps_graph,
        )

    def _lends(self, index: int, module: nn.Module) -> Lender | None:
        read, tied = self.readings.lent(index, module), tied_weights.lender_of(self.ties, index)
        if not read:
            return tied
        lent, users = ({}, {}) if tied is None else (tied.parameters, tied.users)
        readers = self.readings.readers_of.get(index, [])
        return Lender({**lent, **read}, {**users, **{user: [*users.get(user, ()), *read] for user in readers}})

    def _share_out(self, parts: StageParts, reducer: ReplicaReducer | Servers | None) -> None:
        # Where replicas share out the optimizer's state. Emulated ones keep it whole, which changes no number.
        optimizer = parts.optimizer
        if not self.specification.sync.shares_optimizer or optimizer is None or not isinstance(reducer, ReplicaReducer):
            return
        parameters = trainable(parts)
        stepped = [parts.masters.of(parameter) for parameter in parameters]
        shares = Shares(stepped, reducer.count, elementwise=is_elementwise(optimizer))
        if reducer.exchange is not None:
            parts.share = OptimizerShare(optimizer, parameters, parts.masters, shares, reducer)
        modules = [part for part in (parts.module, parts.head) if part is not None]
        parts.norms = self.sharing.norms(modules, parts.masters, (parts.share or shares).norms)

    def _agreement(
        self, parts: StageParts, parameters: list[Tensor], reducer: ReplicaReducer | Servers | None
    ) -> Agreement | None:
        optimizer = parts.optimizer
        if reducer is None or (isinstance(reducer, Servers) and optimizer is None):
            return None
        if isinstance(reducer, ReplicaReducer):
            return agreement(self.specification.sync, reducer, parameters, parts.share)
        assert optimizer is not None, "servers are for stages with an optimizer"
        check_served(self.specification.method, self.specification.sync)
        return reducer.join(parts.index, self.replica, parameters, optimizer, partial(self._step_shard, parts.labels))

    def _step_shard(self, labels: Sequence[Label], parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        specification = self.specification
        optimizer = build_optimizer(labelled(specification.optimizer, labels), parameters)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not stepped <= set(map(id, parameters)):
            raise UsageError(
                f"{specification.sync}: the optimizer steps parameters that it was not given. A server passes it a "
                "shard of the stage: build it from that argument alone, "
                "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        return optimizer, None if specification.scheduler is None else build_scheduler(
            specification.scheduler, optimizer
        )

    def _place(self, index: int, optimizer: torch.optim.Optimizer | None) -> Place:
        delay, recompute = self.delays.mean[index], self.delays.recompute[index]
        momentum = 0.0 if optimizer is None else max(momenta_of(optimizer))  # groups have their own horizons
        delays = self.delays.mean
        return Place(index, self.rules.num_stages, delay, momentum, recompute, sum(delays) / len(delays))


def trainable(parts: StageParts) -> list[nn.Parameter]:
    """The parameters that the stage's optimizer steps: trainable ones of module and head, each once, none borrowed."""
    modules = [part for part in (parts.module, parts.head) if part is not None]
    parameters = list(dict.fromkeys(p for part in modules for p in part.parameters() if p.requires_grad))
    return parameters if parts.borrows is None else parts.borrows.not_borrowed(parameters)


def names_of(prefixes: Sequence[tuple[str, nn.Module | None]], parameters: Sequence[nn.Parameter]) -> list[str]:
    """The names of parameters of modules with these prefixes, as `Trainer.gather` has them."""
    names: dict[int, str] = {}
    for prefix, module in prefixes:
        for name, parameter in () if module is None else module.named_parameters():
            names.setdefault(id(parameter), prefix + name)
    return [names[id(parameter)] for parameter in parameters]
