"""Where emulated replicas meet: an all-reduce, and parameter servers whose shards are all in this process."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.replicas.parameter_server.client import Changes, Servers
from stretto.replicas.parameter_server.shard import Build, Cut, Piece, Shard
from stretto.replicas.reducer import ReplicaReducer, Then
from stretto.replicas.sync_options import ParameterServer

COMPRESSED: Mapping[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LocalServers(Servers):
    """Servers that hold all shards of all stages in this process."""

    def __init__(self, choice: ParameterServer, replicas: int) -> None:
        super().__init__(choice, replicas)
        self._shards: dict[int, list[Shard]] = {}

    def _open(self, stage: int, parameters: Sequence[Tensor], cut: Cut, build: Build) -> None:
        if stage not in self._shards:
            pieces = [[*map(dense, cut.pieces(parameters, shard))] for shard in range(cut.shards)]
            self._shards[stage] = [Shard(parameters_of_shard, self.replicas, build) for parameters_of_shard in pieces]
            self._count(stage)

    def shard(self, stage: int, replica: int) -> Shard:
        return self._shards[stage][replica]

    def push(self, stage: int, replica: int, gradients: Sequence[Sequence[Piece]]) -> tuple[int, Sequence[Changes]]:
        """Only the replica that is next may push, as nothing here can wait."""
        (ticket,) = self.tickets[stage].ask(replica)
        shards = zip(self._shards[stage], gradients, strict=True)
        return ticket.staleness, [shard.update(replica, pieces) for shard, pieces in shards]

    def is_next(self, stage: int, replica: int) -> bool:
        """Whether the next update is this replica's, by the given order or in rotation."""
        return self.tickets[stage].next == replica

    def settle(self, stage: int, replica: int) -> Sequence[Changes]:
        """Tickets begin anew."""
        self.tickets[stage].begin()
        return [shard.changes(replica) for shard in self._shards[stage]]


def dense(piece: Piece) -> Tensor:
    """A piece as a tensor: pieces of parameters, unlike those of gradients, are never sparse."""
    assert isinstance(piece, Tensor), "pieces of parameters are dense"
    return piece


class EmulatedReducer(ReplicaReducer):
    """Replicas call it one after the other; the call of the last one adds up for all, in the order of replicas."""

    def __init__(self, count: int, hook: str | None = None) -> None:
        super().__init__(count)
        self._compressed = COMPRESSED.get(hook)
        self._calls: list[tuple[Sequence[Tensor], Then]] = []

    def add_up(self, tensors: Sequence[Tensor], then: Then) -> None:
        self._meet(tensors, then, None)

    def add_up_gradients(self, gradients: Sequence[Tensor], then: Then) -> None:
        self._meet(gradients, then, self._compressed)

    @torch.no_grad()
    def _meet(self, tensors: Sequence[Tensor], then: Then, compressed: torch.dtype | None) -> None:
        self._calls.append((tensors, then))
        if len(self._calls) < self.count:
            return
        calls, self._calls = self._calls, []
        for addends in zip(*(given for given, _ in calls), strict=True):
            total = self._sum(addends, compressed)
            for addend in addends:
                addend.copy_(total)
        for _, afterwards in calls:
            afterwards()

    def _sum(self, addends: Sequence[Tensor], compressed: torch.dtype | None) -> Tensor:
        # torch's compression hooks send each replica's share of the mean.
        sent = addends if compressed is None else [addend.to(compressed).div_(self.count) for addend in addends]
        total = sent[0].clone()
        for addend in sent[1:]:
            total += addend
        return total if compressed is None else total.to(addends[0].dtype) * self.count

    def forget(self) -> None:
        self._calls = []
