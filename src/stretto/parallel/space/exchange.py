"""Rows that travel between processes, and what autograd must know of it.

What crosses a border forward comes back in backward, added: `Fetch`. What is on every process alike (weights) and meets
a slab has a gradient that is the sum over processes: `Meet`. What every process holds alike because it was summed or
collected sends each process the gradient of its own part only: `Sum`, `Collect`. With these four, gradients are summed
exactly once wherever weights are used on slabs and never where the network goes on replicated.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.parallel.space.geometry import cuts, want
from stretto.parallel.space.grid import Grid
from stretto.parallel.space.route import AxisRows, Block, Box, RowExchange, route
from stretto.parallel.space.slab import ImageCut, Plainly

Dims = tuple[int, ...]


def part(tensor: Tensor, dims: Dims, block: Block) -> Tensor:
    """A view of some rows."""
    for dim, (start, stop) in zip(dims, block, strict=True):
        if stop - start != tensor.size(dim):
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


class Transit:
    """Boxes on their way: posted at once, waited for when they are needed.

    gloo reads a buffer when its receiver is there, so what is sent is kept until it has gone.
    """

    def __init__(self, grid: Grid, leaving: list[tuple[int, Tensor]], arriving: list[tuple[int, Tensor]]) -> None:
        self.received = [tensor for _, tensor in arriving]
        self._sent = [tensor for _, tensor in leaving]
        posts = [grid.post(dist.irecv, tensor, peer) for peer, tensor in arriving]
        posts += [grid.post(dist.isend, tensor, peer) for peer, tensor in leaving]
        self._works = dist.batch_isend_irecv(posts) if posts else []

    def wait(self) -> list[Tensor]:
        """What came, in the order of the boxes."""
        for work in self._works:
            work.wait()
        return self.received


def depart(grid: Grid, tensor: Tensor, dims: Dims, way: RowExchange) -> Transit:
    """Send what others want of this slab."""
    leaving = [(box.peer, part(tensor, dims, box.source).contiguous()) for box in way.sends]
    return Transit(grid, leaving, [(box.peer, empty(tensor, dims, box.target)) for box in way.receives])


def give_back(grid: Grid, like: Tensor, dims: Dims, way: RowExchange, leaving: list[Tensor]) -> Transit:
    """The way back: `leaving` are the gradients of what was received."""
    sent = [(box.peer, tensor) for box, tensor in zip(way.receives, leaving, strict=True)]
    return Transit(grid, sent, [(box.peer, empty(like, dims, box.source)) for box in way.sends])


def add_back(gradient: Tensor, dims: Dims, way: RowExchange, transit: Transit) -> None:
    """Add the gradients that others have for rows of this slab."""
    for box, arrived in zip(way.sends, transit.wait(), strict=True):
        part(gradient, dims, box.source).add_(arrived)


def layout(x: Tensor) -> torch.memory_format:
    """Channels stay last where they are."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def empty(like: Tensor, dims: Dims, block: Block) -> Tensor:
    """A tensor for a box's rows, contiguous."""
    return like.new_empty(resized(like, dims, tuple(span.size for span in block)))


def resized(like: Tensor, dims: Dims, sizes: tuple[int, ...]) -> list[int]:
    """A tensor's shape with other sizes along the cut dims."""
    shape = list(like.shape)
    for dim, size in zip(dims, sizes, strict=True):
        shape[dim] = size
    return shape


def fill_in(buffer: Tensor, dims: Dims, boxes: tuple[Box, ...], arrived: list[Tensor]) -> None:
    """Put what came where it belongs."""
    for box, tensor in zip(boxes, arrived, strict=True):
        part(buffer, dims, box.target).copy_(tensor)


class Fetch(torch.autograd.Function):
    """A buffer with the rows that this process wants; the rest of it holds `fill`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, dims: Dims, way: RowExchange, fill: float) -> Tensor:
        """The buffer, filled with rows of this slab and of others."""
        ctx.grid, ctx.dims, ctx.way, ctx.shape = grid, dims, way, x.shape
        transit = depart(grid, x, dims, way)
        shape = resized(x, dims, way.shape)
        buffer = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout(x))
        if not way.full:
            buffer.fill_(fill)
        fill_in(buffer, dims, way.keep, [part(x, dims, box.source) for box in way.keep])
        fill_in(buffer, dims, way.receives, transit.wait())
        return buffer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The slab's gradient, with those of its rows on other processes added."""
        (gradient,) = gradients
        dims, way = ctx.dims, ctx.way
        leaving = [part(gradient, dims, box.target).contiguous() for box in way.receives]
        result = gradient.new_zeros(ctx.shape)
        transit = give_back(ctx.grid, result, dims, way, leaving)
        for box in way.keep:
            part(result, dims, box.source).add_(part(gradient, dims, box.target))
        add_back(result, dims, way, transit)
        return result, None, None, None, None


def fetch(x: Tensor, cut: ImageCut, lines: tuple[AxisRows, ...], fill: float = 0.0) -> Tensor:
    """What this process wants of an image, under the lines of each cut axis."""
    way = route(lines, cut.grid.place)
    if way.same and not way.sends:
        return x
    buffer: Tensor = Fetch.apply(x, cut.grid, cut.dims, way, fill)  # type: ignore[no-untyped-call]
    return buffer


class Collect(torch.autograd.Function):
    """The whole image, on every process; backward is the slice of this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: ImageCut) -> Tensor:
        """Gather the slabs of all processes."""
        ctx.cut = cut
        return whole(x, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Take the local slice."""
        return part(gradients[0], ctx.cut.dims, ctx.cut.spans).contiguous(), None


class Scatter(torch.autograd.Function):
    """This process's part of an image that every process has; backward collects, so that all have all of it."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, cut: ImageCut) -> Tensor:
        """Take the local slice."""
        ctx.cut = cut
        return part(image, cut.dims, cut.spans).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gather the gradients of all slabs."""
        return whole(gradients[0], ctx.cut), None


def whole(x: Tensor, cut: ImageCut) -> Tensor:
    """Gather the slabs of an image."""
    lines = tuple(
        AxisRows(cuts(size, parts), (want(cuts(size, 1)[0], size),) * parts)
        for size, parts in zip(cut.sizes, cut.grid.parts, strict=True)
    )
    way = route(lines, cut.grid.place)
    transit = depart(cut.grid, x, cut.dims, way)
    image = x.new_empty(resized(x, cut.dims, way.shape))
    fill_in(image, cut.dims, way.keep, [x])
    fill_in(image, cut.dims, way.receives, transit.wait())
    return image


class Meet(torch.autograd.Function):
    """Tensors that every process has, about to meet slabs: the sum of their gradients comes back, in one message."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Pass views on, for autograd to see."""
        ctx.grid = grid
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The sums over processes, in one message."""
        with Plainly():
            return None, *ctx.grid.sum(*(gradient.contiguous() for gradient in gradients))


def meet(grid: Grid, *tensors: Tensor | None) -> list[Tensor | None]:
    """The same tensors, to be used with slabs."""
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    if not (wanted and torch.is_grad_enabled()):
        return list(tensors)
    met = iter(Meet.apply(grid, *wanted))  # type: ignore[no-untyped-call]
    return [next(met) if tensor is not None and tensor.requires_grad else tensor for tensor in tensors]


class SumOverProcesses(torch.autograd.Function):
    """The sum over processes, on every process; each gets its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        """The sum over processes."""
        return grid.sum(x.contiguous())[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient on."""
        return gradients[0], None


def add_up(x: Tensor, grid: Grid) -> Tensor:
    """The sum over processes of what each has of something."""
    total: Tensor = SumOverProcesses.apply(x, grid)  # type: ignore[no-untyped-call]
    return total
