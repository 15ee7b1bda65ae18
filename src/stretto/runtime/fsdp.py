"""A stage's weights dealt out over the processes that hold it in all replicas: torch's FSDP2, as it is."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from stretto.errors import UsageError
from stretto.replicas import FullyShard
from stretto.runtime.replica_group import ReplicaGroup

# Their names until torch 2.11, and from 2.13 on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard(module: nn.Module, replica_group: ReplicaGroup, sync: FullyShard, device: torch.device) -> None:
    """Keep this replica's share of the module's weights from now on, in place; all replicas have the same ones now.

    Layers of at least `sync.min_block` bytes are gathered and given up one by one, the rest of the module at once.
    """
    mesh = DeviceMesh.from_group(replica_group.group, device.type)
    for part in [*blocks_of(module, sync.min_block), module]:
        try:
            made: Any = fully_shard(part, mesh=mesh, reshard_after_forward=sync.reshard)
        except ValueError as error:  # a scalar parameter, say
            raise UsageError(f"sync={sync.name}: {error} Or use sync='all-reduce'") from error
        made.set_custom_all_gather(AllGather(replica_group))
        made.set_custom_reduce_scatter(ReduceScatter(replica_group))
        # Losses carry their shares of the minibatch, so gradients are summed; gloo knows no scaled sum.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)


def blocks_of(module: nn.Module, least: int) -> list[nn.Module]:
    """The large ones of the layers that the module runs one after the other; none if they share weights."""
    layers = list(module.children()) if isinstance(module, nn.Sequential) else []
    everything = [parameter for layer in layers for parameter in layer.parameters()]
    if len(everything) != len(set(everything)):
        return []
    return [layer for layer in layers if size_of(layer.parameters()) >= max(least, 1)]


def size_of(tensors: Iterator[Tensor]) -> int:
    """Bytes of the elements of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Collective:
    """What FSDP2 calls in place of torch's own: this one says what it waits for, and whom it misses."""

    def __init__(self, replica_group: ReplicaGroup) -> None:
        self._replica_group = replica_group
        self._group = replica_group.group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for its input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Collective):
    """Whole weights from shares. On GPUs too the messages go through the host."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Shares in the order of replicas."""
        with self._replica_group.meeting():
            into = output_tensor.cpu()
            all_gather(into, input_tensor.cpu(), group=self._group)
        if into is not output_tensor:
            output_tensor.copy_(into)


class ReduceScatter(Collective):
    """Each share's sum of gradients. On GPUs too the messages go through the host."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`op` is the sum."""
        with self._replica_group.meeting():
            into = output_tensor.cpu()
            reduce_scatter(into, input_tensor.cpu(), op=op, group=self._group)
        if into is not output_tensor:
            output_tensor.copy_(into)
