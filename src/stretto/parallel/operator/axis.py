"""The processes that share a layer's weights: the "tensor" axis of a mesh, and this process's place on it.

Activations pass between whole tensors and parts: collectives, each with the backward that sums gradients once.

| function      | forward        | backward       | used                                                            |
|---------------|----------------|----------------|-----------------------------------------------------------------|
| `enter`       | identity       | all-reduce     | before weights that this process alone has                      |
| `leave`       | all-reduce     | identity       | behind such weights: partial sums become the whole activation   |
| `join`        | all-gather     | own part       | parts along a dim become a whole that all processes use alike   |
| `part`        | own part       | all-gather     | the inverse of `join`                                           |
| `gather`      | all-gather     | reduce-scatter | as `enter`, from parts of the sequence                          |
| `scatter_sum` | reduce-scatter | all-gather     | as `leave`, to parts of the sequence                            |

So whole activations have whole gradients, and a part has its part of the gradient.

A tensor subclass may answer for an exchange as for any of torch's functions (`__torch_function__`): slabs of images do
(`parallel/space`), so that processes which hold the same rows exchange channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function_unary

from stretto.errors import UsageError
from stretto.nn.buckets import align
from stretto.options.checks import of_kind
from stretto.schedule.even_split import part_sizes

NAME = "tensor"
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name since torch 2.13


@dataclass(frozen=True, eq=False)
class Axis:
    """The number of processes, this process's rank among them, and their group, which the mesh has made."""

    mesh: DeviceMesh  # this axis only
    group: dist.ProcessGroup
    size: int
    rank: int

    draws: ClassVar[bool] = True  # whether tensors have numbers, which dropout of parts draws for each process

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
        axis = mesh[NAME]
        return cls(axis, axis.get_group(), axis.size(), axis.get_local_rank())

    def __deepcopy__(self, memo: object) -> "Axis":
        return self  # a copy of a module talks to the same processes

    def cuts(self, count: int) -> tuple[int, ...]:
        """The number of channels of each process, as torch.tensor_split cuts `count` channels."""
        return part_sizes(count, self.size)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum over processes, in a new tensor; bit for bit the same on every process."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def join(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """All-gather: the parts of all processes, concatenated along `dim`; smaller parts are padded on the way."""
        padding = max(sizes) - x.size(dim)
        sent = x.movedim(dim, 0)
        if padding:
            sent = torch.cat([sent, sent.new_zeros(padding, *sent.shape[1:])])
        sent = sent.contiguous()
        received = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(received, sent, group=self.group)
        whole = x.new_empty(*x.shape[:dim], sum(sizes), *x.shape[dim:][1:])  # no view: others may change it in place
        for target, part in zip(torch.split(whole, list(sizes), dim), received, strict=True):
            target.copy_(part[: target.size(dim)].movedim(0, dim))
        return whole

    def part(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """This process's part of a whole tensor, in a new tensor."""
        part = x.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank])
        return part.clone(memory_format=torch.contiguous_format)

    def part_of_sum(self, x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Reduce-scatter: this process's part of the sum over processes; smaller parts are padded on the way."""
        sent = x.new_zeros(self.size, max(sizes), *x.shape[:dim], *x.shape[dim + 1 :])
        for target, part in zip(sent, torch.split(x, list(sizes), dim), strict=True):
            target[: part.size(dim)].copy_(part.movedim(dim, 0))
        received = torch.empty_like(sent[0])
        reduce_scatter(received, sent.flatten(0, 1), group=self.group)
        return received[: sizes[self.rank]].movedim(0, dim).contiguous()

    def align(self, *tensors: Tensor) -> None:
        """Copy the values of the first process to all others, in place."""
        align(tensors, self.group)


Exchange = Callable[[Tensor, int, tuple[int, ...]], Tensor]  # a method of Axis: tensor, dim, size on each process


class Enter(torch.autograd.Function):
    """Identity; backward is an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Return a view: autograd wants an output that is not its input."""
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.sum(gradients[0]), None


class Leave(torch.autograd.Function):
    """All-reduce; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class AlongDim(torch.autograd.Function):
    """An exchange along a dim, and another for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, reverse: Exchange, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.reverse, ctx.dim, ctx.sizes = reverse, dim, sizes
        return exchange(x, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.reverse(gradients[0], ctx.dim, ctx.sizes), None, None, None, None


def enter(x: Tensor, axis: Axis) -> Tensor:
    """A whole activation, about to be used with weights that this process alone has: its gradient is summed."""
    if has_torch_function_unary(x):
        return handle_torch_function(enter, (x,), x, axis)
    entered: Tensor = Enter.apply(x, axis)  # type: ignore[no-untyped-call]
    return entered


def leave(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over processes."""
    if has_torch_function_unary(x):
        return handle_torch_function(leave, (x,), x, axis)
    total: Tensor = Leave.apply(x, axis)  # type: ignore[no-untyped-call]
    return total


def join(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """The whole, gathered along `dim`, to be used alike on every process."""
    if has_torch_function_unary(x):
        return handle_torch_function(join, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.join, axis.part, dim, sizes)


def part(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """This process's part of a whole along `dim`."""
    if has_torch_function_unary(x):
        return handle_torch_function(part, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.part, axis.join, dim, sizes)


def gather(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """The whole, gathered along `dim`, to be used with weights that this process alone has."""
    if has_torch_function_unary(x):
        return handle_torch_function(gather, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.join, axis.part_of_sum, dim, sizes)


def scatter_sum(x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """This process's part, along `dim`, of the sum of x over processes."""
    if has_torch_function_unary(x):
        return handle_torch_function(scatter_sum, (x,), x, axis, dim, sizes)
    return along_dim(x, axis.part_of_sum, axis.join, dim, sizes)


def along_dim(x: Tensor, exchange: Exchange, reverse: Exchange, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Exchange x along `dim`, and its gradient by `reverse`."""
    exchanged: Tensor = AlongDim.apply(x, exchange, reverse, dim, sizes)  # type: ignore[no-untyped-call]
    return exchanged
