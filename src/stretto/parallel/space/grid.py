"""The processes that share an image: the "height" and "width" axes of a mesh, and this process's place on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stretto.errors import UsageError
from stretto.nn.buckets import joined, split_like
from stretto.options.checks import of_kind
from stretto.parallel.space.route import Place

AXES = ("height", "width")
TAG = 0x5AB  # of messages in the default group, between processes that share no axis


@dataclass(frozen=True, eq=False)
class Grid:
    """The number of parts along each cut axis, this process's coordinates, and the ranks of all its processes.

    It uses the mesh's groups and makes none: all processes of a job would have to take part, also those that share no
    image.
    """

    axes: tuple[str, ...]
    parts: tuple[int, ...]
    place: Place
    ranks: tuple[int, ...]  # in the default group, row by row
    groups: tuple[dist.ProcessGroup, ...]  # along each axis

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Grid":
        """The spatial part of a mesh, which may have other axes beside it."""
        of_kind(
            "mesh", mesh, DeviceMesh, 'a torch DeviceMesh: init_device_mesh("cpu", (2,), mesh_dim_names=("height",))'
        )
        names = mesh.mesh_dim_names or ()
        axes = tuple(axis for axis in AXES if axis in names)
        if not axes:
            raise UsageError(
                f'spatial parallelism: the mesh has the axes {names or "(no names)"}, none of them "height" or '
                '"width". For example: init_device_mesh("cpu", (2,), mesh_dim_names=("height",))'
            )
        order = sorted(axes, key=names.index)  # a mesh is sliced in its own order
        space = mesh[tuple(order)]
        ranks = space.mesh.permute([order.index(axis) for axis in axes]).flatten().tolist()
        parts = tuple(space[axis].size() for axis in axes)
        place = tuple(space.get_local_rank(axis) for axis in axes)
        return cls(axes, parts, place, tuple(ranks), tuple(space.get_group(axis) for axis in axes))

    @property
    def size(self) -> int:
        """The number of processes that share an image."""
        return len(self.ranks)

    def p2p_operation(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        """A send to or receive from the process of rank `peer` in the grid; `operation`: dist.isend or dist.irecv."""
        one_axis = len(self.axes) == 1
        group, tag = (self.groups[0], 0) if one_axis else (None, TAG)
        return dist.P2POp(operation, tensor, self.ranks[peer], group, tag)

    def __deepcopy__(self, memo: object) -> "Grid":
        return self  # a copy of a module talks to the same processes

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The sums over all processes, in one all-reduce an axis; bit for bit the same on every process."""
        if self.size == 1 or not tensors:
            return tensors
        flat = joined(tensors)
        for group in self.groups:
            dist.all_reduce(flat, group=group)
        return tuple(total.to(tensor.dtype) for total, tensor in zip(split_like(flat, tensors), tensors, strict=True))

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, which have one shape, stacked by rank: [processes, *shape]."""
        gathered = tensor[None]
        for group, parts in zip(reversed(self.groups), reversed(self.parts), strict=True):
            received = [torch.empty_like(gathered) for _ in range(parts)]
            dist.all_gather(received, gathered, group=group)
            gathered = torch.cat(received)
        return gathered
