"""Where stages are put together: everything that a Trainer was given and one stage needs."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.solo import lent
from stretto.losses import Loss
from stretto.methods import Method
from stretto.methods.cure import Place
from stretto.nn import tied_weights
from stretto.nn.generator import PreservedGenerator
from stretto.nn.seeding import derive
from stretto.nn.sharded_modules import is_sharded
from stretto.nn.tied_weights import Lender
from stretto.replicas import FullyShard, Sync
from stretto.replicas.agreement import Agreement, agreement
from stretto.replicas.parameter_server.client import Served
from stretto.replicas.parameter_server.servers import Servers
from stretto.replicas.reduction import Peers
from stretto.schedule import Delays, Rules
from stretto.stage.arguments import build_optimizer, build_scheduler
from stretto.stage.assemble import Makings, build_practices, check_served, momentum_of
from stretto.stage.precision import Precision
from stretto.stage.shared_stage import Within
from stretto.stage.stage import Practice, Stage
from stretto.weights.sharded import Sharded


class Made(NamedTuple):
    """A stage, how it trains as its method says and in synchronous phases, and where, if anything trains it."""

    stage: Stage
    practices: tuple[Practice, Practice]
    place: Place | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Workshop:
    """`make` puts one stage together; the arguments are those of Trainer."""

    method: Method
    rules: Rules
    delays: Delays
    ties: Sequence[tied_weights.Tied]
    precision: Precision
    loss: Loss
    optimizer: Callable[..., Any]
    scheduler: Callable[..., Any] | None
    clip: float | None
    device: torch.device
    seed: int
    sync: Sync
    within: Within
    replica: int = 0
    read: bool = False  # whether other stages read the last one's readout

    def of_replica(self, replica: int) -> "Workshop":
        """The one that makes a replica's stages."""
        return replace(self, replica=replica)

    def make(self, index: int, module: nn.Module, head: nn.Module | None, peers: Peers | Servers | None = None) -> Made:
        """`peers` are the stage's copies in other replicas. Raises UsageError where the method cannot train it."""
        parts = [part for part in (module, head) if part is not None]
        trained = {tie.owner for tie in self.rules.ties if tie.user == index and tie.trains}
        borrows = tied_weights.borrower_of(self.ties, index, module, trained)
        trainable = list(dict.fromkeys(p for part in parts for p in part.parameters() if p.requires_grad))
        parameters = trainable if borrows is None else borrows.own(trainable)
        masters = self.precision.masters(parts, parameters)
        optimizer = (
            build_optimizer(self.optimizer, [masters.copies.get(p, p) for p in parameters]) if parameters else None
        )
        if optimizer is not None:
            masters.check(optimizer)
            self.within.check(optimizer, index)
        place = self._place(index, optimizer)
        with nullcontext() if borrows is None else borrows.worn(borrows.fixed()):
            practices = build_practices(
                Makings(self.method, module, optimizer, place, masters, self.scheduler),
                autocast=self.precision.name == "bf16-autocast",
                clip=self.clip,
            )
        if isinstance(self.sync, FullyShard) and is_sharded(module):
            split, per_update = index in self.rules.split, self.rules.per_update
            weights = Sharded(module, per_update, split=split, reshard=self.sync.reshard)
            practices = (practices[0]._replace(weights=weights), practices[1])  # no other phases: one set of weights
        meets = self._meets(index, [masters.of(p) for p in parameters], optimizer, peers)
        if isinstance(meets, Served):
            pushes = meets.step
            practices = (practices[0]._replace(step=lambda _: pushes()), practices[1]._replace(step=lambda _: pushes()))
        stage = Stage(
            index,
            module,
            reach=self.rules.reach,
            weights=practices[0].weights,
            loss=self.precision.loss(self.loss),
            head=head,
            optimizer=optimizer,
            scheduler=None
            if self.scheduler is None or optimizer is None or isinstance(meets, Served)
            else build_scheduler(self.scheduler, optimizer),
            split=index in self.rules.split,
            recompute=index in self.rules.recompute,
            mean=self.method.combine == "mean",
            per_update=self.rules.per_update,
            seed_forward=self._seeding(index),
            lends=self._lends(index, module),
            borrows=borrows,
            masters=masters,
            context=lambda: self.precision.forward(self.device),
            agreement=meets,
            norms=self.within.norms(parts, masters),
        )
        return Made(stage, practices, None if optimizer is None else place)

    def _lends(self, index: int, module: nn.Module) -> Lender | None:
        if self.read and index == self.rules.num_stages - 1:
            return Lender(lent(module))
        return tied_weights.lender_of(self.ties, index)

    def _meets(
        self,
        index: int,
        parameters: list[Tensor],
        optimizer: torch.optim.Optimizer | None,
        peers: Peers | Servers | None,
    ) -> Agreement | None:
        if peers is None or (isinstance(peers, Servers) and optimizer is None):
            return None
        if isinstance(peers, Peers):
            return agreement(self.sync, peers, parameters)
        assert optimizer is not None, "there is something to serve"
        check_served(self.method, self.sync)
        return peers.join(index, self.replica, parameters, optimizer, self._step_shard)

    def _step_shard(self, parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = build_optimizer(self.optimizer, parameters)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not stepped <= set(map(id, parameters)):
            raise UsageError(
                f"{self.sync}: the optimizer steps other parameters than it is given, which are a server's shard of a "
                "stage: build it on those, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        return optimizer, None if self.scheduler is None else build_scheduler(self.scheduler, optimizer)

    def _place(self, index: int, optimizer: torch.optim.Optimizer | None) -> Place:
        delay, recompute = self.delays.mean[index], self.delays.recompute[index]
        return Place(index, self.rules.num_stages, delay, momentum_of(optimizer), recompute)

    def _seeding(self, index: int) -> Callable[[int], None]:
        base, generator = derive(self.seed, "forward", index), PreservedGenerator(self.device)
        if self.replica:
            base = derive(base, "replica", self.replica)
        return lambda microbatch: generator.seed(derive(base, microbatch))
