"""Many tensors as few flat ones: what travels is long."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 25 << 20  # bytes that travel at a time, as in DistributedDataParallel


def buckets(tensors: Sequence[Tensor], size: int = BUCKET) -> list[list[Tensor]]:
    """Tensors of one type on one device, together no more than `size` bytes or a single one."""
    filled: list[list[Tensor]] = []
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    current: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        key = (each.dtype, each.device)
        if key not in current or room[key] < each.nbytes:
            current[key], room[key] = [], size
            filled.append(current[key])
        current[key].append(each)
        room[key] -= each.nbytes
    return filled


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One behind the other, in a new tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views of a flat tensor, of the shapes of others."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return (piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True))


@torch.no_grad()
def align(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give every process of a group the values of its first one; a collective."""
    for bucket in buckets(tensors):
        flat = joined(bucket)
        if dist.get_backend(group) == "gloo":
            flat = flat.cpu()
        dist.broadcast(flat, group_src=0, group=group)
        for tensor, values in zip(bucket, split_like(flat, bucket), strict=True):
            tensor.data.copy_(values)


def tensors_of(modules: Iterable[nn.Module | None]) -> list[Tensor]:
    """Every parameter and buffer, each once, in an order that is the same in all replicas."""
    found = [tensor for module in modules if module is not None for tensor in (*module.parameters(), *module.buffers())]
    return list(dict.fromkeys(found))
