"""Where stages find the servers of their weights: in this process, or in those of all replicas."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.replicas.parameter_server.client import ServedAgreement, ServerLink
from stretto.replicas.parameter_server.order import Order
from stretto.replicas.parameter_server.shard import Build, Cut
from stretto.replicas.parameter_server.staleness import Tickets
from stretto.replicas.strategies import ParameterServer


class Servers(ABC):
    """All that this process has to do with. `join` is called for each stage, by each replica that lives here."""

    def __init__(self, choice: ParameterServer, replicas: int) -> None:
        self.choice, self.replicas = choice, replicas
        self._given = choice.given()
        self.tickets: dict[int, Tickets] = {}  # of the stages whose updates are counted here

    def join(
        self, stage: int, replica: int, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, build: Build
    ) -> ServedAgreement:
        """A replica's copy of a stage begins; `build` makes what steps a shard, `optimizer` is one such."""
        cut = Cut(parameters, self.replicas, optimizer)
        return ServedAgreement(self._link(stage, replica, parameters, cut, build), cut, parameters)

    @abstractmethod
    def _link(self, stage: int, replica: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> ServerLink:
        """The replica's way to the stage's servers, which are made if they are to be here and are not yet."""

    def counter(self, stage: int) -> int:
        """The replica whose process counts a stage's updates, and which keeps their log in a checkpoint."""
        return stage % self.replicas

    def _count(self, stage: int) -> Tickets:
        self.tickets[stage] = Tickets(stage, self.replicas, self.choice.staleness, self._given.of(stage))
        return self.tickets[stage]

    def order(self) -> Order:
        """What has happened so far, of the stages that are counted here."""
        return Order(
            {stage: tuple(each.replica for each in tickets.log) for stage, tickets in self.tickets.items()},
            {stage: tuple(each.staleness for each in tickets.log) for stage, tickets in self.tickets.items()},
        )
