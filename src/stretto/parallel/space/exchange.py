"""Rows sent between processes, with the backward of each exchange.

| function           | forward                             | backward                                            |
|--------------------|-------------------------------------|-----------------------------------------------------|
| `Fetch`            | rows of other slabs are received    | their gradients are sent back and added             |
| `SumGradients`     | identity, for weights used on slabs | gradients are summed over processes                 |
| `SumOverProcesses` | all-reduce                          | identity                                            |
| `Collect`          | the image is gathered from slabs    | the slice of this process's rows                    |
| `Scatter`          | the slice of this process's rows    | the image's gradient is gathered from slabs         |

So gradients are summed exactly once where weights are used on slabs, and never where the network goes on replicated.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.parallel.space.geometry import cuts, want
from stretto.parallel.space.halo import AxisRows, Block, Box, RowExchange, route
from stretto.parallel.space.slab import Grid, ImageCut, PlainTensors

Dims = tuple[int, ...]


def block_of(tensor: Tensor, dims: Dims, block: Block) -> Tensor:
    """A view of the rows of a block along the cut dims."""
    for dim, (start, stop) in zip(dims, block, strict=True):
        if stop - start != tensor.size(dim):
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


class Transit:
    """Messages under way: sends and receives start in the constructor and end in `wait`.

    gloo may read a buffer as late as its receiver is ready, so sent tensors are kept until then.
    """

    def __init__(self, grid: Grid, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        self.received = [tensor for _, tensor in receives]
        self._sent = [tensor for _, tensor in sends]
        operations = [grid.p2p_operation(dist.irecv, tensor, peer) for peer, tensor in receives]
        operations += [grid.p2p_operation(dist.isend, tensor, peer) for peer, tensor in sends]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """The received tensors, in the order of `receives`."""
        for work in self._works:
            work.wait()
        return self.received


def send_rows(grid: Grid, tensor: Tensor, dims: Dims, exchange: RowExchange) -> Transit:
    """Start an exchange: send rows of this slab to processes that want them, receive the rows wanted here."""
    sends = [(box.peer, block_of(tensor, dims, box.source).contiguous()) for box in exchange.sends]
    return Transit(grid, sends, [(box.peer, empty(tensor, dims, box.target)) for box in exchange.receives])


def return_gradients(grid: Grid, like: Tensor, dims: Dims, exchange: RowExchange, gradients: list[Tensor]) -> Transit:
    """Start the reverse of an exchange: send the gradients of the received rows, receive those of the sent rows."""
    sends = [(box.peer, tensor) for box, tensor in zip(exchange.receives, gradients, strict=True)]
    return Transit(grid, sends, [(box.peer, empty(like, dims, box.source)) for box in exchange.sends])


def add_gradients(gradient: Tensor, dims: Dims, exchange: RowExchange, transit: Transit) -> None:
    """Add the gradients that `return_gradients` receives to those of this slab's rows."""
    for box, arrived in zip(exchange.sends, transit.wait(), strict=True):
        block_of(gradient, dims, box.source).add_(arrived)


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format of x: channels_last or contiguous."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def empty(like: Tensor, dims: Dims, block: Block) -> Tensor:
    """An uninitialised tensor for the rows of a block, contiguous."""
    return like.new_empty(resized(like, dims, tuple(rows.size for rows in block)))


def resized(like: Tensor, dims: Dims, sizes: tuple[int, ...]) -> list[int]:
    """A tensor's shape with other sizes along the cut dims."""
    shape = list(like.shape)
    for dim, size in zip(dims, sizes, strict=True):
        shape[dim] = size
    return shape


def copy_in(buffer: Tensor, dims: Dims, boxes: tuple[Box, ...], arrived: list[Tensor]) -> None:
    for box, tensor in zip(boxes, arrived, strict=True):
        block_of(buffer, dims, box.target).copy_(tensor)


class Fetch(torch.autograd.Function):
    """A buffer with the rows of the image that this process wants; its other rows hold `fill`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, dims: Dims, exchange: RowExchange, fill: float) -> Tensor:
        ctx.grid, ctx.dims, ctx.exchange, ctx.shape = grid, dims, exchange, x.shape
        transit = send_rows(grid, x, dims, exchange)
        shape = resized(x, dims, exchange.shape)
        buffer = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
        if not exchange.full:
            buffer.fill_(fill)
        copy_in(buffer, dims, exchange.keep, [block_of(x, dims, box.source) for box in exchange.keep])
        copy_in(buffer, dims, exchange.receives, transit.wait())
        return buffer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The slab's gradient, with the gradients that other processes have for its rows."""
        (gradient,) = gradients
        dims, exchange = ctx.dims, ctx.exchange
        halo_gradients = [block_of(gradient, dims, box.target).contiguous() for box in exchange.receives]
        result = gradient.new_zeros(ctx.shape)
        transit = return_gradients(ctx.grid, result, dims, exchange, halo_gradients)
        for box in exchange.keep:
            block_of(result, dims, box.source).add_(block_of(gradient, dims, box.target))
        add_gradients(result, dims, exchange, transit)
        return result, None, None, None, None


def fetch(x: Tensor, cut: ImageCut, axis_rows: tuple[AxisRows, ...], fill: float = 0.0) -> Tensor:
    """The rows that this process wants of an image; `axis_rows` has, for each cut axis, what all have and want."""
    exchange = route(axis_rows, cut.grid.place)
    if exchange.same and not exchange.sends:
        return x
    buffer: Tensor = Fetch.apply(x, cut.grid, cut.dims, exchange, fill)  # type: ignore[no-untyped-call]
    return buffer


class Collect(torch.autograd.Function):
    """The whole image on every process; backward is this process's slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: ImageCut) -> Tensor:
        ctx.cut = cut
        return whole(x, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """This process's slice of the gradient."""
        return block_of(gradients[0], ctx.cut.dims, ctx.cut.spans).contiguous(), None


class Scatter(torch.autograd.Function):
    """This process's slab of an image that every process has; backward gathers the whole gradient on every process."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, cut: ImageCut) -> Tensor:
        ctx.cut = cut
        return block_of(image, cut.dims, cut.spans).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return whole(gradients[0], ctx.cut), None


def whole(x: Tensor, cut: ImageCut) -> Tensor:
    """The image, gathered from the slabs of all processes."""
    axis_rows = tuple(
        AxisRows(cuts(size, parts), (want(cuts(size, 1)[0], size),) * parts)
        for size, parts in zip(cut.sizes, cut.grid.parts, strict=True)
    )
    exchange = route(axis_rows, cut.grid.place)
    transit = send_rows(cut.grid, x, cut.dims, exchange)
    image = x.new_empty(resized(x, cut.dims, exchange.shape))
    copy_in(image, cut.dims, exchange.keep, [x])
    copy_in(image, cut.dims, exchange.receives, transit.wait())
    return image


class SumGradients(torch.autograd.Function):
    """Tensors that every process has, such as weights; their gradients are summed over processes, in one message."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return views: autograd wants outputs that are not the inputs."""
        ctx.grid = grid
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with PlainTensors():
            return None, *ctx.grid.sum(*(gradient.contiguous() for gradient in gradients))


def with_summed_gradients(grid: Grid, *tensors: Tensor | None) -> list[Tensor | None]:
    """The same tensors, to be used on slabs: gradients are summed over processes for those that need one."""
    trained = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    if not (trained and torch.is_grad_enabled()):
        return list(tensors)
    summed = iter(SumGradients.apply(grid, *trained))  # type: ignore[no-untyped-call]
    return [next(summed) if tensor is not None and tensor.requires_grad else tensor for tensor in tensors]


class SumOverProcesses(torch.autograd.Function):
    """All-reduce; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        return grid.sum(x.contiguous())[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def add_up(x: Tensor, grid: Grid) -> Tensor:
    """The sum of x over processes."""
    total: Tensor = SumOverProcesses.apply(x, grid)  # type: ignore[no-untyped-call]
    return total
