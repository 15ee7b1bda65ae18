"""The processes that share a layer's weights: the "tensor" axis of a mesh, and this process's place on it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stretto.errors import UsageError
from stretto.nn.buckets import align
from stretto.options.checks import of_kind
from stretto.schedule.even_split import part_sizes

NAME = "tensor"
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name since torch 2.13


@dataclass(frozen=True, eq=False)
class Axis:
    """How many processes, which of them this one is, and their group; no group is made here."""

    mesh: DeviceMesh  # of this axis only
    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Axis":
        """The tensor axis of a mesh, which may have other axes beside it."""
        of_kind(
            "mesh", mesh, DeviceMesh, 'a torch DeviceMesh: init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))'
        )
        names = mesh.mesh_dim_names or ()
        if NAME not in names:
            raise UsageError(
                f'stretto.parallel.tensor: the mesh has the axes {names or "(no names)"}, none of them "tensor". '
                'For example: init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))'
            )
        own = mesh[NAME]
        return cls(own, own.get_group(), own.size(), own.get_local_rank())

    def __deepcopy__(self, memo: object) -> "Axis":
        return self  # a copy of a module talks to the same processes

    def cuts(self, count: int) -> tuple[int, ...]:
        """How many of `count` channels each process has, as torch.tensor_split cuts."""
        return part_sizes(count, self.size)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes, in a new tensor; bit for bit the same everywhere."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def join(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Everybody's parts one behind the other; parts of unequal size travel as large as the largest."""
        short = max(sizes) - x.size(dim)
        mine = x.movedim(dim, 0)
        if short:
            mine = torch.cat([mine, mine.new_zeros(short, *mine.shape[1:])])
        mine = mine.contiguous()
        every = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(every, mine, group=self.group)
        whole = x.new_empty(*x.shape[:dim], sum(sizes), *x.shape[dim:][1:])  # no view: others may change it in place
        for place, part in zip(torch.split(whole, list(sizes), dim), every, strict=True):
            place.copy_(part[: place.size(dim)].movedim(0, dim))
        return whole

    def part(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """This process's part, in a new tensor."""
        own = x.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank])
        return own.clone(memory_format=torch.contiguous_format)

    def part_of_sum(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """This process's part of the sum over processes; parts travel as large as the largest."""
        every = x.new_zeros(self.size, max(sizes), *x.shape[:dim], *x.shape[dim + 1 :])
        for place, part in zip(every, torch.split(x, list(sizes), dim), strict=True):
            place[: part.size(dim)].copy_(part.movedim(dim, 0))
        own = torch.empty_like(every[0])
        reduce_scatter(own, every.flatten(0, 1), group=self.group)
        return own[: sizes[self.rank]].movedim(0, dim).contiguous()

    def align(self, *tensors: Tensor) -> None:
        """Give every process the values of the first."""
        align(tensors, self.group)
