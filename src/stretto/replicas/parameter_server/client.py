"""The client's side of a parameter server: at each update a stage pushes gradients and takes the newest weights.

The servers step the optimizer, so a push is part of the action U, and the schedule has no action for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.replicas.agreement import Agreement
from stretto.replicas.parameter_server.shard import Build, Cut, Piece, Shard, take
from stretto.replicas.parameter_server.tickets import Order, Ticket, Tickets
from stretto.replicas.reducer import Then
from stretto.replicas.sync_options import ParameterServer

Changes = Sequence[Piece]  # a shard's answer, one piece per parameter


class Servers(ABC):
    """All servers of this process's stages. `join` is called for each stage of each replica in this process."""

    def __init__(self, choice: ParameterServer, replicas: int) -> None:
        self.choice, self.replicas = choice, replicas
        self._requested = choice.requested_order()
        self.tickets: dict[int, Tickets] = {}  # of the stages whose updates this process counts

    def join(
        self, stage: int, replica: int, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, build: Build
    ) -> "ServedAgreement":
        """The agreement of a replica's stage; `build` makes a shard's optimizer, of the same type as `optimizer`."""
        cut = Cut(parameters, self.replicas, optimizer)
        self._open(stage, parameters, cut, build)
        return ServedAgreement(self, stage, replica, cut, parameters)

    @abstractmethod
    def _open(self, stage: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> None:
        """Make this process's shards of a stage, unless they are there."""

    @abstractmethod
    def shard(self, stage: int, replica: int) -> Shard:
        """The shard that a replica's checkpoint holds."""

    @abstractmethod
    def push(self, stage: int, replica: int, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        """Update with the gradients' pieces of each shard; returns after the answers.

        Returns the staleness of the update, and the weights of each shard that changed since this replica's last call.
        """

    @abstractmethod
    def settle(self, stage: int, replica: int) -> Sequence[Changes]:
        """Wait until all replicas pause; return the weights of each shard that changed since this replica's last call.

        The sequence may be empty if no replica has pushed.
        """

    def is_next(self, stage: int, replica: int) -> bool:
        """Whether this replica makes the next update; always True where a push can wait for its turn."""
        return True

    def counter(self, stage: int) -> int:
        """The replica whose process counts a stage's updates, and whose checkpoint keeps their log."""
        return stage % self.replicas

    def _count(self, stage: int) -> Tickets:
        self.tickets[stage] = Tickets(stage, self.replicas, self.choice.staleness, self._requested.of(stage))
        return self.tickets[stage]

    def order(self) -> Order:
        return Order(
            {stage: tuple(ticket.replica for ticket in tickets.log) for stage, tickets in self.tickets.items()},
            {stage: tuple(ticket.staleness for ticket in tickets.log) for stage, tickets in self.tickets.items()},
        )


class ServedAgreement(Agreement):
    """A replica's stage that servers train; `parameters` are those that its optimizer would step."""

    def __init__(self, servers: Servers, stage: int, replica: int, cut: Cut, parameters: Sequence[Tensor]) -> None:
        self._servers, self._stage, self._replica = servers, stage, replica
        self._cut, self._parameters = cut, parameters

    remembers = True
    steps = True

    @property
    def is_next(self) -> bool:
        return self._servers.is_next(self._stage, self._replica)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._own[0].optimizer

    def step(self) -> None:
        """Push the gradients and take the changed weights, in place of an optimizer's step.

        Raises UsageError for gradients that cannot be cut.
        """
        gradients = self._pieces([parameter.grad for parameter in self._parameters])
        self.staleness, changes = self._servers.push(self._stage, self._replica, gradients)
        self._take(changes)

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Do nothing: replicas meet on the servers, in `step`."""

    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Take the newest weights, which are then equal in all replicas; call `then`."""
        self._take(self._servers.settle(self._stage, self._replica))
        then()

    def forget(self) -> None:
        """Do nothing: no call leaves a message under way."""

    @property
    def _own(self) -> tuple[Shard, Tickets | None]:
        # What a checkpoint keeps for this replica; one keeps the tickets, the same one in emulation and on processes.
        counts = self._servers.counter(self._stage) == self._replica
        shard = self._servers.shard(self._stage, self._replica)
        return shard, self._servers.tickets[self._stage] if counts else None

    def _pieces(self, tensors: Sequence[Tensor | None]) -> list[list[Piece]]:
        return [self._cut.pieces(tensors, shard) for shard in range(self._cut.shards)]

    def _take(self, changes: Sequence[Changes]) -> None:
        for shard, shard_changes in enumerate(changes):
            take(self._parameters, self._cut.rows(shard), shard_changes)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer state of one shard, and the log [updates, 2]: replica and staleness of each update so far.

        Call it after a flush, when all replicas have the same weights.
        """
        shard, tickets = self._own
        log = None if tickets is None else [(ticket.replica, ticket.staleness) for ticket in tickets.log]
        return {
            "shard": shard.state_dict(),
            "log": None if log is None else torch.tensor(log, dtype=torch.int32).reshape(-1, 2),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        shard, tickets = self._own
        version, log = state["shard"]["version"], state["log"]
        shard.check(state["shard"])
        if (log is None) != (tickets is None):
            raise ValueError("the log of updates belongs to another replica")
        if log is not None and (not isinstance(log, Tensor) or log.dtype != torch.int32 or log.shape != (version, 2)):
            raise ValueError(f"the log of updates is no int32 tensor of shape {(version, 2)}")
        if log is not None and not bool(((log >= 0) & (log[:, :1] < self._cut.shards)).all()):
            raise ValueError(f"the log of updates has a negative number, or a replica above {self._cut.shards - 1}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the shard gets its weights from this replica's parameters."""
        shard, tickets = self._own
        weights = [parameter.detach() for parameter in self._parameters]
        shard.load_state_dict(state["shard"], self._pieces(weights)[self._replica])
        if tickets is not None:
            log = enumerate(state["log"].tolist())
            tickets.restart([Ticket(replica, number, staleness) for number, (replica, staleness) in log])
