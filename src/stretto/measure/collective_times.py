"""What collectives take as training runs them: by the same code, and between work that keeps all processes busy.

A round is some work and a collective; what it takes longer than the work alone, which nobody waits for, is the time of
the collective: packing, messages, unpacking, and waiting for whoever is late. What sharded weights take comes from
pairs of Trainers, one with whole weights and one with sharded ones.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stretto.cost.collective import GRADIENTS, HALO, RESHARDING, SHARDING, TENSOR_GATHER, TENSOR_SUM, Collective
from stretto.measure.messages import SampleWork, agreed, reduced, seconds
from stretto.measure.nonnegative_fit import fit
from stretto.measure.overhead import optimizer
from stretto.mesh import Mesh
from stretto.parallel.operator.axis import Axis
from stretto.replicas.agreement import GradientSum
from stretto.replicas.sync_options import AllReduce
from stretto.runtime.failure import Status
from stretto.runtime.replica_group import GroupPeers, ReplicaGroup
from stretto.trainer.trainer import Trainer

WORK = 1e-3  # seconds of work in a round
BLOCKS, QUICK_BLOCKS = 7, 3
BLOCK, ROUNDS = 0.12, (3, 40)  # seconds of a block, and the fewest and the most rounds of it
STEPS, SHARDING_BLOCKS, QUICK_SHARDING_BLOCKS = 6, 5, 2  # steps of a Trainer in a block
WARM = 2
BATCH = 128


class CollectiveTime(NamedTuple):
    """One measured collective: its seconds beside the work around it."""

    name: str
    tensors: float
    bytes: float
    seconds: float


GRADIENT_SHAPES = ((2, 256), (16, 1 << 10), (4, 1 << 14), (32, 1 << 14), (4, 1 << 18), (4, 1 << 20), (24, 1 << 18))
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)  # bytes of activations and halos
SHARDED = ((4, 32), (16, 64), (4, 256), (12, 256), (4, 768), (3, 1280))  # layers and their width
QUICK = 3  # of each, the first ones


def measure_collectives(
    group: dist.ProcessGroup, *, quick: bool, tell: Callable[[], object]
) -> tuple[CollectiveTime, ...]:
    """Measure on all processes of a group; the same result on all of them."""
    torch.manual_seed(0)
    found: list[CollectiveTime] = []
    beside = BesideWork(group, QUICK_BLOCKS if quick else BLOCKS)
    for kind in (gradient_sums, exchanges, halos):
        for name, tensors, num_bytes, call in kind(group, quick):
            found.append(CollectiveTime(name, tensors, num_bytes, beside.seconds(call)))
        tell()
    found += sharded(group, quick=quick)
    tell()
    return tuple(found)


def steps_of() -> int:
    """How often `measure_collectives` tells that it has come further."""
    return 4


class BesideWork:
    """Measures what a call takes in a round of work, on all processes at the same time."""

    def __init__(self, group: dist.ProcessGroup, blocks: int) -> None:
        self._group, self._blocks = group, blocks
        self._work = SampleWork()
        self._number = self._work.number_in(WORK, group, trials=20)

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds that the call adds to a round, the median over blocks, of the mean over processes."""
        call()
        dist.barrier(group=self._group)
        one = reduced(self._group, seconds(call), dist.ReduceOp.MAX) + WORK
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(BLOCK / one)))
        return max(1e-7, statistics.median(self._block(call, rounds) for _ in range(self._blocks)))

    def _block(self, call: Callable[[], object], rounds: int) -> float:
        def work() -> None:
            for _ in range(rounds):
                self._work(self._number)

        def both() -> None:
            for _ in range(rounds):
                self._work(self._number)
                call()

        dist.barrier(group=self._group)
        alone = seconds(work)
        dist.barrier(group=self._group)
        together = seconds(both)
        return agreed(self._group, together - alone) / rounds


Calls = Iterator[tuple[str, float, float, Callable[[], object]]]  # name, tensors, bytes, call


def gradient_sums(group: dist.ProcessGroup, quick: bool) -> Calls:
    """Meetings of replicas: so many gradients of so many numbers."""
    ranks = dist.get_process_group_ranks(group)
    agreement = GradientSum(GroupPeers(ReplicaGroup(group, ranks, Status()), AllReduce()))
    for number, size in GRADIENT_SHAPES[: QUICK if quick else None]:
        parameters = [nn.Parameter(torch.zeros(size)) for _ in range(number)]
        for parameter in parameters:
            parameter.grad = torch.zeros(size)
        call = partial(agreement.meet, parameters, 0, lambda: None)
        yield GRADIENTS, number, 4.0 * number * size, call


def exchanges(group: dist.ProcessGroup, quick: bool) -> Calls:
    """Activations of processes that share weights: sums of them, and wholes from parts."""
    nothing: Any = None
    axis = Axis(nothing, group, group.size(), group.rank())
    for size in SIZES[: QUICK if quick else None]:
        columns = size // 4 // 16
        whole, sizes = torch.zeros(16, columns), axis.cuts(columns)
        yield TENSOR_SUM, 0, float(size), partial(axis.sum, whole)
        yield TENSOR_GATHER, 0, float(size), partial(axis.join, axis.part(whole, 1, sizes), 1, sizes)


def halos(group: dist.ProcessGroup, quick: bool) -> Calls:
    """Rows sent to a neighbour, and received from it."""
    rank, size = group.rank(), group.size()
    for num_bytes in SIZES[: QUICK if quick else None]:
        rows = torch.zeros(num_bytes // 4)

        def exchange(rows: Tensor = rows) -> None:
            received = torch.empty_like(rows)
            operations = [
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
                dist.P2POp(dist.isend, rows.contiguous(), group=group, group_peer=(rank + 1) % size),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        yield HALO, 0, float(num_bytes), exchange


def sharded(group: dist.ProcessGroup, *, quick: bool) -> list[CollectiveTime]:
    """What a step takes longer with sharded weights, of networks of linear layers."""
    found = []
    for layers, width in SHARDED[: QUICK if quick else None]:
        trainers = {sync: replicas(group, layers, width, sync) for sync in SYNCS.values()}
        x = torch.randn(BATCH * group.size(), width)
        taken: dict[str, list[float]] = {sync: [] for sync in trainers}
        for _ in range(QUICK_SHARDING_BLOCKS if quick else SHARDING_BLOCKS):
            for sync, trainer in trainers.items():
                taken[sync].append(steps(group, trainer, x))
        for trainer in trainers.values():
            trainer.flush()
        num_bytes = 4.0 * layers * width * (width + 1)
        for name in (SHARDING, RESHARDING):
            pairs = zip(taken[SYNCS[name]], taken[SYNCS[GRADIENTS]], strict=True)
            longer = statistics.median(one - other for one, other in pairs)
            found.append(CollectiveTime(name, 2.0 * layers, num_bytes, max(1e-7, longer)))
    return found


SYNCS = {GRADIENTS: "all-reduce", SHARDING: "fully-shard", RESHARDING: "fully-shard(reshard=True)"}


def replicas(group: dist.ProcessGroup, layers: int, width: int, sync: str) -> Trainer:
    """A replica of a network of one stage in every process."""
    torch.manual_seed(0)
    stage = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return Trainer([stage], mse_loss, optimizer, "backprop", mesh=Mesh(data=group.size()), sync=sync, device="cpu")


def steps(group: dist.ProcessGroup, trainer: Trainer, x: Tensor) -> float:
    """Seconds of a step, the mean over processes of their medians."""
    for _ in range(WARM):
        trainer.step(x, x)
    dist.barrier(group=group)
    return agreed(group, statistics.median(seconds(partial(trainer.step, x, x)) for _ in range(STEPS)))


def collectives_of(times: Sequence[CollectiveTime], processes: int) -> Mapping[str, Collective]:
    """What each kind takes for a call, a tensor and a byte."""
    found = {}
    for name in dict.fromkeys(each.name for each in times):
        own = [each for each in times if each.name == name]
        line = fit([(1.0, each.tensors, each.bytes) for each in own], [each.seconds for each in own])
        per_call, per_tensor, per_byte = line.rates
        found[name] = Collective(
            processes=processes, per_call=per_call, per_tensor=per_tensor, per_byte=per_byte, residual=line.residual
        )
    return found
