"""Connects stages with the servers of their weights: in this process, or in the processes of all replicas."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.replicas.parameter_server.client import ServedAgreement, ServerLink
from stretto.replicas.parameter_server.shard import Build, Cut
from stretto.replicas.parameter_server.staleness import Tickets
from stretto.replicas.parameter_server.update_log import Order
from stretto.replicas.sync_options import ParameterServer


class Servers(ABC):
    """All servers of this process's stages. `join` is called for each stage of each replica in this process."""

    def __init__(self, choice: ParameterServer, replicas: int) -> None:
        self.choice, self.replicas = choice, replicas
        self._requested = choice.requested_order()
        self.tickets: dict[int, Tickets] = {}  # of the stages whose updates this process counts

    def join(
        self, stage: int, replica: int, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, build: Build
    ) -> ServedAgreement:
        """The agreement of a replica's stage; `build` makes a shard's optimizer, of the same type as `optimizer`."""
        cut = Cut(parameters, self.replicas, optimizer)
        return ServedAgreement(self._link(stage, replica, parameters, cut, build), cut, parameters)

    @abstractmethod
    def _link(self, stage: int, replica: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> ServerLink:
        """The replica's connection to the stage's servers; makes the servers of this process at the first call."""

    def counter(self, stage: int) -> int:
        """The replica whose process counts a stage's updates, and whose checkpoint keeps their log."""
        return stage % self.replicas

    def _count(self, stage: int) -> Tickets:
        self.tickets[stage] = Tickets(stage, self.replicas, self.choice.staleness, self._requested.of(stage))
        return self.tickets[stage]

    def order(self) -> Order:
        """The order of all updates so far, of the stages whose updates this process counts."""
        return Order(
            {stage: tuple(ticket.replica for ticket in tickets.log) for stage, tickets in self.tickets.items()},
            {stage: tuple(ticket.staleness for ticket in tickets.log) for stage, tickets in self.tickets.items()},
        )
