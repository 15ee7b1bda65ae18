"""Many small tensors joined into few flat ones, so that each message is long."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 25 << 20  # bytes of one message, as in DistributedDataParallel


def buckets(tensors: Sequence[Tensor], size: int = BUCKET) -> list[list[Tensor]]:
    """Group tensors of one dtype and device in buckets of at most `size` bytes; a larger tensor has one of its own."""
    filled: list[list[Tensor]] = []
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    current: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        if key not in current or room[key] < tensor.nbytes:
            current[key], room[key] = [], size
            filled.append(current[key])
        current[key].append(tensor)
        room[key] -= tensor.nbytes
    return filled


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of the tensors in order, as one new flat tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Consecutive views of a flat tensor, with the shapes of `tensors`: the inverse of `joined`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return (piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True))


@torch.no_grad()
def align(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast the values of the group's first process to all others, in place. A collective of the group."""
    for bucket in buckets(tensors):
        flat = joined(bucket)
        if dist.get_backend(group) == "gloo":
            flat = flat.cpu()
        dist.broadcast(flat, group_src=0, group=group)
        for tensor, values in zip(bucket, split_like(flat, bucket), strict=True):
            tensor.data.copy_(values)


def tensors_of(modules: Iterable[nn.Module | None]) -> list[Tensor]:
    """Every parameter and buffer, each once, in an order that is the same in all replicas."""
    present = [module for module in modules if module is not None]
    return list(dict.fromkeys(t for module in present for t in (*module.parameters(), *module.buffers())))
