"""How a stage is put together: the one place that makes a `Stage` of a module, a head and the specification."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.solo import lent
from stretto.methods.cure import Place
from stretto.nn import tied_weights
from stretto.nn.seeding import ForwardSeeds
from stretto.nn.sharded_modules import is_sharded
from stretto.nn.tied_weights import Lender
from stretto.replicas.agreement import Agreement, agreement
from stretto.replicas.parameter_server.client import ServedAgreement
from stretto.replicas.parameter_server.servers import Servers
from stretto.replicas.reduction import ReplicaReducer
from stretto.schedule import Delays, Rules
from stretto.stage.arguments import build_optimizer, build_scheduler
from stretto.stage.practice import build_practices, check_served, momentum_of
from stretto.stage.shared_stage import StageSharing
from stretto.stage.specification import Specification
from stretto.stage.stage import PhaseSettings, Stage, StageParts
from stretto.weights.sharded import Sharded


class BuiltStage(NamedTuple):
    """A stage, how it trains as its method says and in synchronous phases, and where, if anything trains it."""

    stage: Stage
    practices: tuple[PhaseSettings, PhaseSettings]
    place: Place | None


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBuilder:
    """`build` puts one stage of one replica together.

    `ties` are the parameters that several stages of this replica use, `within` is how processes share one stage, `read`
    says whether other stages read the last one's readout.
    """

    specification: Specification
    rules: Rules
    delays: Delays
    ties: Sequence[tied_weights.Tied]
    within: StageSharing
    read: bool = False
    replica: int = 0

    def of_replica(self, replica: int, ties: Sequence[tied_weights.Tied]) -> "StageBuilder":
        """The one that builds a replica's stages."""
        return replace(self, replica=replica, ties=ties)

    def build(
        self, index: int, module: nn.Module, head: nn.Module | None, peers: ReplicaReducer | Servers | None = None
    ) -> BuiltStage:
        """`peers` are the stage's copies in other replicas. Raises UsageError where the method cannot train it."""
        of = self.specification
        parts = self._parts(index, module, head)
        optimizer = parts.optimizer
        place = self._place(index, optimizer)
        with nullcontext() if parts.borrows is None else parts.borrows.worn(parts.borrows.fixed()):
            practices = build_practices(of, parts, place)
        if of.sync.sharding is not None and is_sharded(module):
            split, per_update = index in self.rules.split, self.rules.per_update
            weights = Sharded(module, per_update, split=split, reshard=of.sync.sharding.reshard)
            practices = (practices[0]._replace(weights=weights), practices[1])  # no other phases: one set of weights
        stepped = [parts.masters.of(p) for p in trainable(parts)]
        parts.agreement = self._agreement(index, stepped, optimizer, peers)
        if isinstance(parts.agreement, ServedAgreement):
            pushes = parts.agreement.step
            practices = (practices[0]._replace(step=lambda _: pushes()), practices[1]._replace(step=lambda _: pushes()))
        elif of.scheduler is not None and optimizer is not None:
            parts.scheduler = build_scheduler(of.scheduler, optimizer)
        stage = Stage(parts, of, self.rules, practices[0])
        return BuiltStage(stage, practices, None if optimizer is None else place)

    def _parts(self, index: int, module: nn.Module, head: nn.Module | None) -> StageParts:
        # All but what replicas and schedulers add once it is known how the stage trains.
        of = self.specification
        trained = {tie.owner for tie in self.rules.ties if tie.user == index and tie.trains}
        parts = StageParts(
            index=index,
            module=module,
            head=head,
            lends=self._lends(index, module),
            borrows=tied_weights.borrower_of(self.ties, index, module, trained),
            seeds=ForwardSeeds(of.device, of.seed, index, self.replica),
        )
        modules = [part for part in (module, head) if part is not None]
        parameters = trainable(parts)
        parts.masters = of.precision.masters(modules, parameters)
        parts.norms = self.within.norms(modules, parts.masters)
        if parameters:
            parts.optimizer = build_optimizer(of.optimizer, [parts.masters.copies.get(p, p) for p in parameters])
            parts.masters.check(parts.optimizer)
            self.within.check(parts.optimizer, index)
        return parts

    def _lends(self, index: int, module: nn.Module) -> Lender | None:
        if self.read and index == self.rules.num_stages - 1:
            return Lender(lent(module))
        return tied_weights.lender_of(self.ties, index)

    def _agreement(
        self,
        index: int,
        parameters: list[Tensor],
        optimizer: torch.optim.Optimizer | None,
        peers: ReplicaReducer | Servers | None,
    ) -> Agreement | None:
        if peers is None or (isinstance(peers, Servers) and optimizer is None):
            return None
        if isinstance(peers, ReplicaReducer):
            return agreement(self.specification.sync, peers, parameters)
        assert optimizer is not None, "there is something to serve"
        check_served(self.specification.method, self.specification.sync)
        return peers.join(index, self.replica, parameters, optimizer, self._step_shard)

    def _step_shard(self, parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        of = self.specification
        optimizer = build_optimizer(of.optimizer, parameters)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not stepped <= set(map(id, parameters)):
            raise UsageError(
                f"{of.sync}: the optimizer steps other parameters than it is given, which are a server's shard of a "
                "stage: build it on those, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        return optimizer, None if of.scheduler is None else build_scheduler(of.scheduler, optimizer)

    def _place(self, index: int, optimizer: torch.optim.Optimizer | None) -> Place:
        delay, recompute = self.delays.mean[index], self.delays.recompute[index]
        return Place(index, self.rules.num_stages, delay, momentum_of(optimizer), recompute)


def trainable(parts: StageParts) -> list[nn.Parameter]:
    """What the stage's optimizer is for: its own trainable parameters and its head's, each once."""
    modules = [part for part in (parts.module, parts.head) if part is not None]
    parameters = list(dict.fromkeys(p for part in modules for p in part.parameters() if p.requires_grad))
    return parameters if parts.borrows is None else parts.borrows.own(parameters)
