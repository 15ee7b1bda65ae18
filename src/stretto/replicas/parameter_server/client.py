"""What a stage of one replica does with its servers: at each update it pushes gradients and takes the newest weights.

Servers do what the optimizer does otherwise, so this happens in U, and no action of its own is needed for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.replicas.agreement import Agreement
from stretto.replicas.parameter_server.shard import Cut, Piece, Shard, take
from stretto.replicas.parameter_server.staleness import Ticket, Tickets
from stretto.replicas.reduction import Then

Changes = Sequence[Piece]  # of each parameter, a shard's answer


class ServerLink(ABC):
    """One replica's way to the servers of a stage, of which each has a shard. Answers are there on return."""

    @abstractmethod
    def push(self, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        """Update with each shard's pieces; returns the staleness of the update, and what has changed in each shard."""

    @abstractmethod
    def settle(self) -> Sequence[Changes]:
        """Training pauses, in all replicas: what has changed in each shard since, or nothing if nobody has pushed."""

    @property
    def is_next(self) -> bool:
        """Whether a push would be the next update, where somebody has to keep to an order that nobody waits for."""
        return True

    @property
    @abstractmethod
    def own(self) -> tuple[int, Shard, Tickets | None]:
        """The shard that a checkpoint keeps for this replica, its number, and the tickets, if it keeps them, too.

        Those of a stage are kept by one replica, the same in emulation and on processes.
        """


class ServedAgreement(Agreement):
    """A copy of a stage that others' servers train; `parameters` are what its optimizer would step."""

    def __init__(self, link: ServerLink, cut: Cut, parameters: Sequence[Tensor]) -> None:
        self._link, self._cut, self._parameters = link, cut, parameters

    remembers = True
    steps = True

    @property
    def is_next(self) -> bool:
        """Whether it may update now."""
        return self._link.is_next

    def step(self) -> None:
        """In place of an optimizer's step. Raises UsageError for gradients that cannot be cut."""
        self.staleness, changes = self._link.push(self._pieces([parameter.grad for parameter in self._parameters]))
        self._take(changes)

    def meet(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """It has: in its step."""

    def settle(self, parameters: Sequence[Tensor], updates: int, then: Then) -> None:
        """Take what others have pushed since."""
        self._take(self._link.settle())
        then()

    def forget(self) -> None:
        """Nothing is under way."""

    def _pieces(self, tensors: Sequence[Tensor | None]) -> list[list[Piece]]:
        return [self._cut.pieces(tensors, shard) for shard in range(self._cut.shards)]

    def _take(self, changes: Sequence[Changes]) -> None:
        for shard, own in enumerate(changes):
            take(self._parameters, self._cut.rows(shard), own)

    def state_dict(self) -> dict[str, Any]:
        """What steps one of the shards, and [number, 2] of the replica and the staleness of each update so far.

        After a flush: then all replicas have the same weights.
        """
        _, shard, tickets = self._link.own
        log = None if tickets is None else [(each.replica, each.staleness) for each in tickets.log]
        return {
            "shard": shard.state_dict(),
            "log": None if log is None else torch.tensor(log, dtype=torch.int32).reshape(-1, 2),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """The shard's, and as many updates as it has had, each by a replica that there is."""
        _, shard, tickets = self._link.own
        version, log = state["shard"]["version"], state["log"]
        shard.check(state["shard"])
        if (log is None) != (tickets is None):
            raise ValueError("the log of updates is another replica's")
        if log is not None and (not isinstance(log, Tensor) or log.dtype != torch.int32 or log.shape != (version, 2)):
            raise ValueError(f"the log of updates is not one of {version}")
        if log is not None and not bool(((log >= 0) & (log[:, :1] < self._cut.shards)).all()):
            raise ValueError("the log of updates has replicas that there are not")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, and with the weights that this copy has."""
        number, shard, tickets = self._link.own
        shard.load_state_dict(state["shard"], self._pieces([each.detach() for each in self._parameters])[number])
        if tickets is not None:
            log = enumerate(state["log"].tolist())
            tickets.restart([Ticket(replica, number, staleness) for number, (replica, staleness) in log])
