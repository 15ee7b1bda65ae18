"""Servers of emulated replicas: their shards are here, and an update is over when its push returns."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.replicas.parameter_server.client import Changes, ServerLink
from stretto.replicas.parameter_server.servers import Servers
from stretto.replicas.parameter_server.shard import Build, Cut, Piece, Shard
from stretto.replicas.parameter_server.staleness import Tickets
from stretto.replicas.strategies import ParameterServer


class LocalServers(Servers):
    """All shards of all stages."""

    def __init__(self, choice: ParameterServer, replicas: int) -> None:
        super().__init__(choice, replicas)
        self._shards: dict[int, list[Shard]] = {}

    def _link(self, stage: int, replica: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> ServerLink:
        if stage not in self._shards:
            pieces = [[*map(whole, cut.pieces(parameters, shard))] for shard in range(cut.shards)]
            self._shards[stage] = [Shard(own, self.replicas, build) for own in pieces]
            self._count(stage)
        counts = replica == self.counter(stage)
        return LocalLink(replica, self.tickets[stage], self._shards[stage], counts)


@dataclass(frozen=True, eq=False)
class LocalLink(ServerLink):
    """Whoever pushes must be next: nobody can wait here."""

    replica: int
    tickets: Tickets
    shards: Sequence[Shard]
    counts: bool  # whether, on processes, the tickets would be here

    def push(self, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        """At once."""
        (ticket,) = self.tickets.ask(self.replica)
        return ticket.staleness, [
            shard.update(self.replica, pieces) for shard, pieces in zip(self.shards, gradients, strict=True)
        ]

    @property
    def is_next(self) -> bool:
        """By the given order, or in turns."""
        return self.tickets.next == self.replica

    def settle(self) -> Sequence[Changes]:
        """Everybody has pushed."""
        self.tickets.begin()
        return [shard.changes(self.replica) for shard in self.shards]

    @property
    def own(self) -> tuple[int, Shard, Tickets | None]:
        """What would be in its process."""
        return self.replica, self.shards[self.replica], self.tickets if self.counts else None


def whole(piece: Piece) -> Tensor:
    """A piece of a parameter, which is dense."""
    assert isinstance(piece, Tensor), "a parameter is dense"
    return piece
