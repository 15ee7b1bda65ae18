"""Layers cut by this package, not by torch's styles: each process holds plain tensors.

A column layer (outputs cut) keeps its forward, except on a gathered sequence. A row layer (inputs cut) has to add its
bias once, behind the sum over processes: its class is replaced by one that does.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis, join, leave, part
from stretto.parallel.operator.piece import Piece, keep_part
from stretto.parallel.operator.randomness import draw_apart
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


def share_heads(attention: nn.MultiheadAttention, role: Role, axis: Axis, boundary: Boundary | None = None) -> None:
    """Keep role.sizes[rank] of an attention's heads. `boundary`: its activations, whole ones by default."""
    rows = tuple(num_heads * attention.head_dim for num_heads in role.sizes)
    for name in ("in_proj_weight", "in_proj_bias"):
        keep_part(attention, name, Piece(axis, 0, rows, blocks=3))
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        keep_part(attention, name, Piece(axis, 0, rows))
    for name in ("bias_k", "bias_v"):
        keep_part(attention, name, Piece(axis, 2, rows))
    keep_part(attention.out_proj, "weight", Piece(axis, 1, rows))
    attention.__class__ = Heads
    # torch's fused inference reads the packed weight as that of all heads; this attribute turns it off.
    attention.__dict__.update(
        axis=axis, sizes=role.sizes, boundary=boundary or WholeActivations(axis), _qkv_same_embed_dim=False
    )
    if attention.dropout:
        draw_apart(attention, axis)


class Heads(nn.MultiheadAttention):
    """Some of an attention's heads; inputs and output are whole, or parts of the sequence.

    torch's styles cannot cut it: query, key and value share one packed weight, and its forward needs all heads. Here
    each process holds, under the same names, the rows of its heads in each third of that weight, and their columns of
    the output layer's weight.
    """

    axis: Axis
    sizes: tuple[int, ...]
    boundary: Boundary

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's own: inputs and output [T, N, E], [N, T, E] with batch_first, or [T, E]."""
        if is_causal and attn_mask is None:  # only a hint that the mask is causal, as for torch, which refuses it, too
            raise UsageError("attention: is_causal=True without a mask: give attn_mask=, the causal mask, as well")
        unbatched = query.ndim == 2
        inputs = entered((query, key, value), self.boundary)
        q, k, v = self.projected(*(self.batch_first_view(x, unbatched) for x in inputs))
        if unbatched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        attended, weights = self.attended(q, k, v, self.mask(attn_mask, key_padding_mask, q, k), need_weights)
        out = F.linear(attended.transpose(1, 2).flatten(2), self.out_proj.weight)
        out = self.boundary.leave(out[0] if unbatched else out if self.batch_first else out.transpose(0, 1))
        if self.out_proj.bias is not None:
            out = out + self.boundary.used(self.out_proj.bias)
        all_weights = None if weights is None else self.gathered_weights(weights, average_attn_weights)
        return out, all_weights[0] if unbatched and all_weights is not None else all_weights

    def batch_first_view(self, x: Tensor, unbatched: bool) -> Tensor:
        """An input as [N, T, E]."""
        if unbatched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of this process's heads, [N, heads, T, head_dim], with torch's extra keys and values."""
        packed = self.in_proj_weight
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (self.boundary.linear(*args) for args in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """The mask to add to the scores: [N or 1, heads or 1, T, S]; it hides no extra key."""
        parts = []
        if attention is not None:
            per_head = attention.ndim == 3
            mask = attention.reshape(-1, self.num_heads, *attention.shape[1:]) if per_head else attention[None, None]
            first = sum(self.sizes[: self.axis.rank])
            parts.append(mask[:, first : first + q.size(1)] if per_head else mask)
        if padding is not None:
            parts.append(padding[:, None, None])
        total = None
        for hidden in parts:
            added = (
                torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
                if hidden.dtype == torch.bool
                else hidden
            )
            added = F.pad(added, (0, k.size(2) - added.size(-1)))
            total = added if total is None else total + added
        return total

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output of each head, [N, heads, T, head_dim], and the attention weights if needed."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout), None
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        return weights @ v, weights

    def gathered_weights(self, weights: Tensor, average: bool) -> Tensor:
        """The attention weights of all heads, [N, heads, T, S], or their mean, [N, T, S]."""
        if average:
            total: Tensor = leave(weights.sum(1), self.axis) / self.num_heads
            return total
        return join(weights, self.axis, 1, self.sizes)


def entered(inputs: tuple[Tensor, ...], boundary: Boundary) -> list[Tensor]:
    """The inputs after `boundary.enter`; a tensor that is several of them enters once."""
    distinct = {id(x): x for x in inputs}
    entered_of = {key: boundary.enter(x) for key, x in distinct.items()}
    return [entered_of[id(x)] for x in inputs]
