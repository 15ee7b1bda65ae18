"""Layers cut by our own code: columns, rows, groups and vocabularies, each process with plain tensors of its own.

A column layer (outputs cut) runs its own forward on its own weights, but where it takes a gathered sequence. A row
layer (inputs cut) must add its bias once, behind the sum, so its class is exchanged for one that does.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.exchange import join, leave, part
from stretto.parallel.operator.piece import Piece, keep
from stretto.parallel.operator.role import Role, is_transposed, kind
from stretto.parallel.operator.span import Between, SequenceParts, WholeActivations


def cut(layer: nn.Module, role: Role, axis: Axis, between: Between | None = None) -> None:
    """Give a layer its part. `between` is what a column takes and a row gives; otherwise that is whole."""
    if role.style in ("column", "row"):
        {"column": column, "row": row}[role.style](
            layer, role, axis, WholeActivations(axis) if between is None else between
        )
    else:
        {"groups": grouped, "vocabulary": vocabulary, "channels": channels}[role.style](layer, role, axis)


def column(layer: nn.Module, role: Role, axis: Axis, between: Between) -> None:
    """Its own outputs, from all inputs."""
    known = kind(layer)
    assert known is not None
    keep(layer, "weight", Piece(axis, known.outputs, role.sizes, role.blocks))
    keep(layer, "bias", Piece(axis, 0, role.sizes, role.blocks))
    if is_transposed(layer):
        layer.nf = role.blocks * role.sizes[axis.rank]  # type: ignore[assignment]
    if isinstance(between, SequenceParts):
        layer.__class__ = ColumnTransposed if is_transposed(layer) else ColumnLinear
        layer.__dict__["between"] = between
    layer.register_forward_pre_hook(Entering(between))
    if not role.sliced:
        layer.register_forward_hook(Joining(axis, known.channels, role.sizes))


class ColumnLinear(nn.Linear):
    """A linear layer with some of its outputs, on a gathered sequence."""

    between: SequenceParts

    def forward(self, input: Tensor) -> Tensor:
        """As torch's own, but for what is kept."""
        return self.between.linear(input, self.weight, self.bias)


class ColumnTransposed(nn.Module):
    """Hugging Face's Conv1D, likewise."""

    between: SequenceParts
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """As its own, but for what is kept."""
        return self.between.linear(x, self.weight.T, self.bias)


def grouped(layer: nn.Module, role: Role, axis: Axis) -> None:
    """Its own groups of a convolution: outputs that need no other inputs than theirs."""
    known = kind(layer)
    assert known is not None
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    keep(layer, "weight", Piece(axis, 0, role.sizes))
    keep(layer, "bias", Piece(axis, 0, role.sizes))
    every, outputs, inputs = layer.groups, layer.out_channels, layer.in_channels
    layer.groups = role.sizes[axis.rank] * every // outputs
    if not role.sliced:
        of_inputs = tuple(size * inputs // outputs for size in role.sizes)
        layer.register_forward_pre_hook(Parting(axis, known.channels, of_inputs))
        layer.register_forward_hook(Joining(axis, known.channels, role.sizes))


def row(layer: nn.Module, role: Role, axis: Axis, between: Between) -> None:
    """All outputs, from its own inputs: a part of a sum."""
    known = kind(layer)
    assert known is not None
    keep(layer, "weight", Piece(axis, known.inputs, role.sizes))
    layer.__class__ = RowTransposed if is_transposed(layer) else ROWS[type(layer)]
    layer.__dict__["between"] = between
    if not role.sliced:
        layer.register_forward_pre_hook(Parting(axis, known.channels, role.sizes))


class RowLinear(nn.Linear):
    """A linear layer with some of its inputs."""

    between: Between

    def forward(self, input: Tensor) -> Tensor:
        """Sum over processes, then the bias."""
        total = self.between.leave(F.linear(input, self.weight))
        return total if self.bias is None else total + self.between.used(self.bias)


class RowTransposed(nn.Module):
    """Hugging Face's Conv1D with some of its inputs."""

    between: Between
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Sum over processes, then the bias."""
        return self.between.leave(x @ self.weight) + self.between.used(self.bias)


class RowConv(nn.modules.conv._ConvNd):
    """A convolution with some of its input channels."""

    between: Between

    def forward(self, input: Tensor) -> Tensor:
        """Sum over processes, then the bias."""
        total = self.between.leave(self._conv_forward(input, self.weight, None))
        return total if self.bias is None else total + self.bias.view(-1, *(1,) * len(self.kernel_size))


class RowConv1d(RowConv, nn.Conv1d):
    """Of signals."""


class RowConv2d(RowConv, nn.Conv2d):
    """Of images."""


class RowConv3d(RowConv, nn.Conv3d):
    """Of volumes."""


ROWS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowLinear, nn.Conv1d: RowConv1d, nn.Conv2d: RowConv2d, nn.Conv3d: RowConv3d,
}  # fmt: skip


def channels(layer: nn.Module, role: Role, axis: Axis) -> None:
    """A normalisation with its own channels of what is cut anyway: its statistics need no other process."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        keep(layer, name, Piece(axis, 0, role.sizes))
    if hasattr(layer, "num_features"):
        layer.num_features = role.sizes[axis.rank]  # type: ignore[assignment]
    if isinstance(layer, nn.GroupNorm):
        layer.num_groups = role.sizes[axis.rank] * layer.num_groups // layer.num_channels


def vocabulary(layer: nn.Module, role: Role, axis: Axis) -> None:
    """An embedding with some of its rows: zero for all other tokens, then the sum."""
    keep(layer, "weight", Piece(axis, 0, role.sizes))
    layer.__class__ = Rows
    layer.__dict__.update(axis=axis, first=sum(role.sizes[: axis.rank]))


class Rows(nn.Embedding):
    """An embedding with some of its rows."""

    axis: Axis
    first: int

    def forward(self, input: Tensor) -> Tensor:
        """Look up what is here."""
        place = input - self.first
        elsewhere = (place < 0) | (place >= self.weight.size(0))
        rows = F.embedding(place.masked_fill(elsewhere, 0), self.weight)
        return leave(rows.masked_fill(elsewhere[..., None], 0), self.axis)


@dataclass(frozen=True)
class Entering:
    """Before a column: the input's gradient is a sum."""

    between: Between

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> Any:
        """A forward pre-hook."""
        return self.between.enter(args[0]), *args[1:]


@dataclass(frozen=True)
class Parting:
    """Before a row that gets the whole: its part."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> Any:
        """A forward pre-hook."""
        return part(args[0], self.axis, self.dim, self.sizes), *args[1:]


@dataclass(frozen=True)
class Joining:
    """Behind a column whose output is wanted whole."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]

    def __call__(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A forward hook."""
        return join(output, self.axis, self.dim, self.sizes)
