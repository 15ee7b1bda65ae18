"""A stage's weights dealt out over the processes that hold it in all replicas: torch's FSDP2, as it is."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from stretto.errors import UsageError
from stretto.nn.memory_limit import bytes_of
from stretto.replicas import FullyShard
from stretto.runtime.replica_group import ReplicaGroup, posted

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.11


def shard(
    module: nn.Module, replica_group: ReplicaGroup, sync: FullyShard, device: torch.device, *, sums_once: bool = False
) -> None:
    """Keep this replica's share of the module's weights from now on, in place; all replicas have the same ones now.

    Layers of at least `sync.min_block` bytes are gathered and given up one by one, the rest of the module at once.
    `sums_once`: an update sums gradients once, so that nothing reads the sums before the end of the backward.
    """
    mesh = DeviceMesh.from_group(replica_group.group, device.type)
    gather, scatter = AllGather(replica_group), ReduceScatter(replica_group, late=sums_once and not sync.reshard)
    for part in [*blocks_of(module, sync.min_block), module]:
        try:
            made: Any = fully_shard(part, mesh=mesh, reshard_after_forward=sync.reshard)
        except ValueError as error:  # a scalar parameter, say
            raise UsageError(f"sync={sync.name}: {error} Or use sync='all-reduce'") from error
        made.set_custom_all_gather(gather)
        made.set_custom_reduce_scatter(scatter)
        # Losses carry their shares of the minibatch, so gradients are summed; gloo knows no scaled sum.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)


def blocks_of(module: nn.Module, least: int) -> list[nn.Module]:
    """The large ones of the layers that the module runs one after the other; none if they share weights."""
    layers = list(module.children()) if isinstance(module, nn.Sequential) else []
    everything = [parameter for layer in layers for parameter in layer.parameters()]
    if len(everything) != len(set(everything)):
        return []
    return [layer for layer in layers if bytes_of(layer.parameters()) >= max(least, 1)]


class WatchedCollective:
    """What FSDP2 calls in place of torch's own: this one says what it waits for, and whom it misses."""

    def __init__(self, replica_group: ReplicaGroup) -> None:
        self._replica_group = replica_group
        self._group = replica_group.group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(WatchedCollective):
    """Whole weights from shares. On GPUs too the messages go through the host."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        into = output_tensor.cpu()
        with self._replica_group.meeting():
            work = all_gather(into, input_tensor.cpu(), group=self._group, async_op=async_op)
        if into is not output_tensor:
            if work is not None:
                work.wait()
            output_tensor.copy_(into)
        return None if work is None else Gathering(work, self._replica_group)


class Gathering(dist.Work):
    """An all-gather on its way, which says whom it misses."""

    def __init__(self, work: dist.Work, replica_group: ReplicaGroup) -> None:
        super().__init__()
        self._work, self._replica_group = work, replica_group

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._replica_group.meeting():
            self._work.wait()
        return True


class ReduceScatter(WatchedCollective):
    """Each share's sum of gradients. On GPUs too the messages go through the host.

    gloo's own copies the gradients and sums all of them on every replica (torch 2.13). Here each replica sends others
    their shares and adds up its own, in the order of replicas. `late`: the sums are complete only at the end of the
    backward that asks for them, and the messages travel while it goes on.
    """

    def __init__(self, replica_group: ReplicaGroup, *, late: bool) -> None:
        super().__init__(replica_group)
        self._late = late
        self._begun: list[tuple[Tensor, ShareExchange]] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`op` is the sum."""
        with self._replica_group.meeting():
            exchange = reduce_scatter(input_tensor.cpu(), self._group)
        self._begun.append((output_tensor, exchange))
        if not self._late:
            self._finish()
        elif len(self._begun) == 1:
            Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        with torch.no_grad(), self._replica_group.meeting():
            for output, exchange in begun:
                exchange.sum(output)


class ShareExchange(NamedTuple):
    """Shares on their way to the replicas whose they are: own and received ones in the order of replicas."""

    shares: Sequence[Tensor]
    works: Sequence[dist.Work]
    sent: Tensor  # in use until then

    def sum(self, output: Tensor) -> None:
        """Wait for all shares and write their sum."""
        for work in self.works:
            work.wait()
        total = output if output.device.type == "cpu" else torch.empty_like(output, device="cpu")
        torch.add(self.shares[0], self.shares[1], out=total)
        for share in self.shares[2:]:
            total.add_(share)
        if total is not output:
            output.copy_(total)


def reduce_scatter(gradients: Tensor, group: dist.ProcessGroup) -> ShareExchange:
    """Send each replica its share of `gradients` [replicas * share], and receive this one's of the others."""
    me, shares = dist.get_rank(group), list(gradients.chunk(dist.get_world_size(group)))
    sent = {other: [share] for other, share in enumerate(shares) if other != me}
    received = {other: [torch.empty_like(share)] for other, (share,) in sent.items()}
    works = posted(sent, received, group)
    for other, (share,) in received.items():
        shares[other] = share
    return ShareExchange(shares, works, gradients)
