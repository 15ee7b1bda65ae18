"""The parameter servers of emulated replicas: all shards are in this process, and a push updates them at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.replicas.parameter_server.client import Changes, ServerLink
from stretto.replicas.parameter_server.servers import Servers
from stretto.replicas.parameter_server.shard import Build, Cut, Piece, Shard
from stretto.replicas.parameter_server.staleness import Tickets
from stretto.replicas.sync_options import ParameterServer


class LocalServers(Servers):
    """Servers that hold all shards of all stages in this process."""

    def __init__(self, choice: ParameterServer, replicas: int) -> None:
        super().__init__(choice, replicas)
        self._shards: dict[int, list[Shard]] = {}

    def _link(self, stage: int, replica: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> ServerLink:
        if stage not in self._shards:
            pieces = [[*map(dense, cut.pieces(parameters, shard))] for shard in range(cut.shards)]
            self._shards[stage] = [Shard(parameters_of_shard, self.replicas, build) for parameters_of_shard in pieces]
            self._count(stage)
        counts = replica == self.counter(stage)
        return LocalLink(replica, self.tickets[stage], self._shards[stage], counts)


@dataclass(frozen=True, eq=False)
class LocalLink(ServerLink):
    """A replica's link to the shards of a stage. Only the replica that is next may push, as nothing here can wait."""

    replica: int
    tickets: Tickets
    shards: Sequence[Shard]
    counts: bool  # whether, with processes, the tickets would be in this replica's process

    def push(self, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        """Update every shard; returns the update's staleness and each shard's changes."""
        (ticket,) = self.tickets.ask(self.replica)
        return ticket.staleness, [
            shard.update(self.replica, pieces) for shard, pieces in zip(self.shards, gradients, strict=True)
        ]

    @property
    def is_next(self) -> bool:
        """Whether the next update is this replica's, by the given order or in rotation."""
        return self.tickets.next == self.replica

    def settle(self) -> Sequence[Changes]:
        """Each shard's changes since this replica's last call, once all replicas have pushed; tickets begin anew."""
        self.tickets.begin()
        return [shard.changes(self.replica) for shard in self.shards]

    @property
    def own(self) -> tuple[int, Shard, Tickets | None]:
        """This replica's number, its shard, and the tickets if a process of its own would hold them."""
        return self.replica, self.shards[self.replica], self.tickets if self.counts else None


def dense(piece: Piece) -> Tensor:
    """A piece as a tensor: pieces of parameters, unlike those of gradients, are never sparse."""
    assert isinstance(piece, Tensor), "pieces of parameters are dense"
    return piece
