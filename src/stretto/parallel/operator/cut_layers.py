"""Layers cut by this package, not by torch's styles: each process holds plain tensors.

A column layer (outputs cut) keeps its forward, except on a gathered sequence. A row layer (inputs cut) has to add its
bias once, behind the sum over processes: its class is replaced by one that does.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel.operator.axis import Axis, join, leave, part
from stretto.parallel.operator.piece import Piece, keep_part
from stretto.parallel.operator.role import Role, is_transposed, weight_dims
from stretto.parallel.operator.span import Boundary, SequenceParts, WholeActivations


def cut(layer: nn.Module, role: Role, axis: Axis, boundary: Boundary | None = None) -> None:
    """Replace a layer's weights by this process's part. `boundary`: a pair's activations, whole ones by default."""
    if role.style in ("column", "row"):
        {"column": column, "row": row}[role.style](
            layer, role, axis, WholeActivations(axis) if boundary is None else boundary
        )
    else:
        {"groups": grouped, "vocabulary": vocabulary, "channels": channels}[role.style](layer, role, axis)


def column(layer: nn.Module, role: Role, axis: Axis, boundary: Boundary) -> None:
    """Keep some of a layer's outputs, computed from all inputs."""
    dims = weight_dims(layer)
    assert dims is not None
    keep_part(layer, "weight", Piece(axis, dims.outputs, role.sizes, role.blocks))
    keep_part(layer, "bias", Piece(axis, 0, role.sizes, role.blocks))
    if is_transposed(layer):
        layer.nf = role.blocks * role.sizes[axis.rank]  # type: ignore[assignment]
    if isinstance(boundary, SequenceParts):
        layer.__class__ = ColumnTransposed if is_transposed(layer) else ColumnLinear
        layer.__dict__["boundary"] = boundary
    layer.register_forward_pre_hook(partial(enter_input, boundary))
    if not role.sliced:
        layer.register_forward_hook(partial(gather_output, axis, dims.channels, role.sizes))


class ColumnLinear(nn.Linear):
    """nn.Linear with some of its outputs, on a gathered sequence."""

    boundary: SequenceParts

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., this process's outputs]; the graph does not keep the gathered input."""
        return self.boundary.linear(input, self.weight, self.bias)


class ColumnTransposed(nn.Module):
    """Hugging Face's Conv1D with some of its outputs, on a gathered sequence."""

    boundary: SequenceParts
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., this process's outputs]; the graph does not keep the gathered input."""
        return self.boundary.linear(x, self.weight.T, self.bias)


def grouped(layer: nn.Module, role: Role, axis: Axis) -> None:
    """Keep some groups of a convolution; a group needs no other group's inputs."""
    dims = weight_dims(layer)
    assert dims is not None
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    keep_part(layer, "weight", Piece(axis, 0, role.sizes))
    keep_part(layer, "bias", Piece(axis, 0, role.sizes))
    outputs, inputs = layer.out_channels, layer.in_channels
    layer.groups = role.sizes[axis.rank] * layer.groups // outputs
    if not role.sliced:
        input_sizes = tuple(size * inputs // outputs for size in role.sizes)
        layer.register_forward_pre_hook(partial(slice_input, axis, dims.channels, input_sizes))
        layer.register_forward_hook(partial(gather_output, axis, dims.channels, role.sizes))


def row(layer: nn.Module, role: Role, axis: Axis, boundary: Boundary) -> None:
    """Keep some of a layer's inputs; the outputs are partial sums, which the layer's new class adds up."""
    dims = weight_dims(layer)
    assert dims is not None
    keep_part(layer, "weight", Piece(axis, dims.inputs, role.sizes))
    layer.__class__ = RowTransposed if is_transposed(layer) else ROWS[type(layer)]
    layer.__dict__["boundary"] = boundary
    if not role.sliced:
        layer.register_forward_pre_hook(partial(slice_input, axis, dims.channels, role.sizes))


class RowLinear(nn.Linear):
    """nn.Linear with some of its inputs."""

    boundary: Boundary

    def forward(self, input: Tensor) -> Tensor:
        """Sum partial outputs over processes, then add the bias."""
        total = self.boundary.leave(F.linear(input, self.weight))
        return total if self.bias is None else total + self.boundary.used(self.bias)


class RowTransposed(nn.Module):
    """Hugging Face's Conv1D with some of its inputs."""

    boundary: Boundary
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Sum partial outputs over processes, then add the bias."""
        return self.boundary.leave(x @ self.weight) + self.boundary.used(self.bias)


class RowConv(nn.modules.conv._ConvNd):
    """A convolution with some of its input channels, in any number of dims."""

    boundary: Boundary

    def forward(self, input: Tensor) -> Tensor:
        """Sum partial outputs over processes, then add the bias."""
        total = self.boundary.leave(self._conv_forward(input, self.weight, None))
        return total if self.bias is None else total + self.bias.view(-1, *(1,) * len(self.kernel_size))


class RowConv1d(RowConv, nn.Conv1d):
    """nn.Conv1d with some of its input channels."""


class RowConv2d(RowConv, nn.Conv2d):
    """nn.Conv2d with some of its input channels."""


class RowConv3d(RowConv, nn.Conv3d):
    """nn.Conv3d with some of its input channels."""


ROWS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowLinear,
    nn.Conv1d: RowConv1d,
    nn.Conv2d: RowConv2d,
    nn.Conv3d: RowConv3d,
}


def channels(layer: nn.Module, role: Role, axis: Axis) -> None:
    """Keep some channels of a norm between a column and a row; its statistics need no other process."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        keep_part(layer, name, Piece(axis, 0, role.sizes))
    if hasattr(layer, "num_features"):
        layer.num_features = role.sizes[axis.rank]  # type: ignore[assignment]
    if isinstance(layer, nn.GroupNorm):
        layer.num_groups = role.sizes[axis.rank] * layer.num_groups // layer.num_channels


def vocabulary(layer: nn.Module, role: Role, axis: Axis) -> None:
    """Keep some rows of an embedding; its new class returns the sum over processes."""
    keep_part(layer, "weight", Piece(axis, 0, role.sizes))
    layer.__class__ = EmbeddingRows
    layer.__dict__.update(axis=axis, first=sum(role.sizes[: axis.rank]))


class EmbeddingRows(nn.Embedding):
    """nn.Embedding with the rows of some tokens, from token `first` on."""

    axis: Axis
    first: int

    def forward(self, input: Tensor) -> Tensor:
        """Look up this process's tokens, zero for all others, and sum over processes."""
        index = input - self.first
        missing = (index < 0) | (index >= self.weight.size(0))
        rows = F.embedding(index.masked_fill(missing, 0), self.weight)
        return leave(rows.masked_fill(missing[..., None], 0), self.axis)


# Hooks, whose arguments before the layer are bound.
def enter_input(boundary: Boundary, layer: nn.Module, args: tuple[Any, ...]) -> Any:
    """Prepare the input of a column: gather parts of the sequence, and sum the gradient over processes."""
    return boundary.enter(args[0]), *args[1:]


def slice_input(axis: Axis, dim: int, sizes: tuple[int, ...], layer: nn.Module, args: tuple[Any, ...]) -> Any:
    """Give a layer this process's channels of a whole input."""
    return part(args[0], axis, dim, sizes), *args[1:]


def gather_output(axis: Axis, dim: int, sizes: tuple[int, ...], layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Gather the channels of a layer's output from all processes."""
    return join(output, axis, dim, sizes)
