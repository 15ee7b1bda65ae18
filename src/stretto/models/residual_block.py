"""The block of decoders, encoders and vision transformers: attention and a perceptron beside a residual stream.

What a block keeps for its backward, in 16 bits and for s tokens, b examples, width h and a heads, is what Korthikanti
et al. 2022 (https://arxiv.org/abs/2205.05198, equation 1) count for Megatron's kernels, s b h (34 + 5 a s / h) bytes:

    norms             4 s b h    their inputs; torch keeps a mean and a deviation of each token beside them
    qkv               2 s b h    its input
    core              6 s b h + 5 a s s b    `CoreAttention`: queries, keys, values; of each score 5 bytes
    output            2 s b h    its input; and its dropout's mask, s b h
    widen, GELU      10 s b h    their inputs
    narrow            8 s b h    its input; and its dropout's mask, s b h

A residual sum keeps nothing. Query, key and value are one layer, as the gate of a gated perceptron and what it gates
are: processes that share weights then exchange one sum of the input's gradient, not one for each.

Operators are fused as large models have them (`ResidualSum`, `RMSNorm`, `rotary`), or run one by one, as a program does
that fuses none, BERT of 2019 for example: each adds a bias, scales scores, masks them, drops out or adds to the stream
in a pass of its own over memory, and GELU is five.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.flop_counter import shape_wrapper

from stretto.models.core_attention import CoreAttention, Dropout, FusedAttention, repeated
from stretto.models.transformer import initialise
from stretto.nn.flop_counter import FORMULAS, attention, attention_backward


def at_least_float32(x: Tensor) -> torch.dtype:
    """The type that statistics of a tensor are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


@library.custom_op("stretto::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) over the last dim, times weight; and 1 / sqrt(...), which the backward needs."""
    wide = x.to(at_least_float32(x))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype), scale


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=at_least_float32(x))


@library.custom_op("stretto::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    normed, wide = x * scale, gradient.to(scale.dtype)
    scaled = wide * weight
    towards = (scaled * normed).mean(-1, keepdim=True)
    of_x = (scale * (scaled - normed * towards)).to(x.dtype)
    return of_x, (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)


@rms_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm_gradients(ctx, gradient, _):  # type: ignore[no-untyped-def]
    return *rms_norm_backward(gradient, *ctx.saved_tensors), None


rms_norm.register_autograd(_rms_norm_gradients, setup_context=_keep)


@library.custom_op("stretto::rotary", mutates_args=())
def rotary(x: Tensor, turn: float) -> Tensor:
    """x [N, heads, T, d] with pair (i, i + d/2) of each token turned by turn * position * 10000^(-2i/d).

    Su et al. 2021; `turn` is 1, or -1 to turn back.
    """
    length, width = x.shape[2:]
    rates = turn * 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / -width)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device=x.device), rates)
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other = x.chunk(2, dim=3)
    return torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=3)


@rotary.register_fake
def _(x: Tensor, turn: float) -> Tensor:
    return x.new_empty(x.shape)


def _keep_turn(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.turn = inputs[1]


def _turn_back(ctx, gradient):  # type: ignore[no-untyped-def]
    return rotary(gradient, -ctx.turn), None


rotary.register_autograd(_turn_back, setup_context=_keep_turn)


@library.custom_op("stretto::dropped_sum", mutates_args=())
def dropped_sum(residual: Tensor, branch: Tensor, bias: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    """residual + dropout(branch + bias); and the mask, one byte an element, empty where nothing is dropped."""
    whole = branch if bias is None else branch + bias
    if p == 0:
        return residual + whole, whole.new_empty(0, dtype=torch.bool)
    dropped, mask = torch.native_dropout(whole, p, True)
    return residual + dropped, mask


@dropped_sum.register_fake
def _(residual: Tensor, branch: Tensor, bias: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), branch.new_empty(branch.shape if p else 0, dtype=torch.bool)


def _keep_mask(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.p, ctx.has_bias = inputs[3], inputs[2] is not None
    ctx.save_for_backward(output[1])


def _dropped_gradients(ctx, gradient, _):  # type: ignore[no-untyped-def]
    (mask,) = ctx.saved_tensors
    of_branch = gradient
    if ctx.p:
        of_branch = torch.ops.aten.native_dropout_backward(gradient, mask, 1 / (1 - ctx.p))
    of_bias = of_branch.flatten(0, -2).sum(0) if ctx.has_bias else None
    return gradient, of_branch, of_bias, None


dropped_sum.register_autograd(_dropped_gradients, setup_context=_keep_mask)


class ResidualSum(nn.Module):
    """residual + dropout(branch + bias), [N, T, width] -> [N, T, width], in one operator.

    The bias is that of the branch's last layer. Behind a sum over processes, it would be another pass over the branch.
    """

    def __init__(self, width: int, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.dropout = dropout
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, residual: Tensor, branch: Tensor) -> Tensor:
        out: Tensor = dropped_sum(residual, branch, self.bias, self.dropout if self.training else 0.0)[0]
        return out


class RMSNorm(nn.Module):
    """nn.RMSNorm as one operator: it keeps its input, and one number of each token."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = rms_norm(x, self.weight, self.eps)[0]
        return out


class EagerLinear(nn.Linear):
    """nn.Linear that adds its bias behind the product, as torch did until 2020 to tensors of three dims."""

    def forward(self, input: Tensor) -> Tensor:
        out = linear(input, self.weight)
        return out if self.bias is None else out + self.bias


class EagerGELU(nn.Module):
    """GELU by its formula, or with approximate="tanh" by that of Hendrycks and Gimpel (2016)."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """x times the distribution function of a normal variable at x."""
        if self.approximate == "tanh":
            return x * 0.5 * (1.0 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
        return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


class EagerCoreAttention(CoreAttention):
    """CoreAttention with scores that are scaled and masked by operators of their own."""

    def scores(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """The scores of [N heads, T, d] queries and keys."""
        return torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[2]) + mask


class ScaledCoreAttention(CoreAttention):
    """CoreAttention with scores that are scaled by an operator of their own, as timm had it until 2023.

    Without `causal` there is no mask.
    """

    def scores(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """The scores of [N heads, T, d] queries and keys."""
        scaled: Tensor = torch.bmm(queries, keys.transpose(1, 2)) * float(queries.shape[2] ** -0.5)
        return scaled if mask.numel() == 1 else scaled + mask


class EagerSum(nn.Module):
    """residual + dropout(branch + bias), [N, T, width] -> [N, T, width], in three operators."""

    def __init__(self, width: int, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, residual: Tensor, branch: Tensor) -> Tensor:
        whole = branch if self.bias is None else branch + self.bias
        out: Tensor = residual + self.dropout(whole)
        return out


def token_by_token(x: Tensor) -> Tensor:
    """[N, heads, T, d] in memory as [N, T, heads, d], as such kernels write it: no copy joins the heads of a token."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@library.custom_op("stretto::attention_2022", mutates_args=())
def attention_2022(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(Q K' / sqrt(d)) V, [N, heads, T, d]; and room for a float32 number of each row, for the backward."""
    mixed = scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    return token_by_token(mixed), query.new_zeros(query.shape[:3], dtype=torch.float32)


@attention_2022.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return token_by_token(query.new_empty(query.shape)), query.new_empty(query.shape[:3], dtype=torch.float32)


@library.custom_op("stretto::attention_2022_backward", mutates_args=())
def attention_2022_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, rows: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; what was mixed is read, and the rows' numbers."""
    shared, scale = query.shape[1] // key.shape[1], query.shape[3] ** -0.5
    keys, values = repeated(key, shared), repeated(value, shared)
    scores = query @ keys.transpose(2, 3) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    shares = scores.softmax(-1)
    of_shares = gradient @ values.transpose(2, 3)
    of_scores = scale * shares * (of_shares - (gradient * mixed).sum(-1, keepdim=True))
    of_keys, of_values = of_scores.transpose(2, 3) @ query, shares.transpose(2, 3) @ gradient
    of_key, of_value = (x.unflatten(1, (-1, shared)).sum(2) for x in (of_keys, of_values))
    return token_by_token(of_scores @ keys), token_by_token(of_key), token_by_token(of_value)


@attention_2022_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, rows: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (token_by_token(x.new_empty(x.shape)) for x in (query, key, value))
    return of_query, of_key, of_value


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.is_causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output)


def _attention_gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    of_query, of_key, of_value = attention_2022_backward(gradient, *ctx.saved_tensors, ctx.is_causal)
    return of_query, of_key, of_value, None


attention_2022.register_autograd(_attention_gradients, setup_context=_keep_attention)
FORMULAS[torch.ops.stretto.attention_2022] = shape_wrapper(attention)  # type: ignore[no-untyped-call]
FORMULAS[torch.ops.stretto.attention_2022_backward] = shape_wrapper(attention_backward)  # type: ignore[no-untyped-call]


class EarlyFusedAttention(nn.Module):
    """FusedAttention (core_attention.py) by the kernels of 2022: it keeps no scores, and drops none out."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed: Tensor = attention_2022(query, key, value, self.causal)[0]
        return mixed.transpose(1, 2).flatten(2)


NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}
POSITIONS = ("learned", "rotary")


@dataclass(frozen=True)
class BlockShape:
    """What the blocks of a network have in common.

    `heads` of queries share `kv_heads` of keys and values, `hidden` units are in the perceptron, `context` is the most
    tokens. attention: "scores", "scaled-scores", "fused" or "fused-2022". norm: one of NORMS, positions of POSITIONS.
    Not `fused`: each operator by itself. GELU is approximated by tanh where it is `causal`.
    """

    depth: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    causal: bool
    attention: str
    dropout: float
    gated: bool
    bias: bool
    norm: str
    positions: str
    fused: bool

    def normalisation(self) -> nn.Module:
        """A norm over the features of each token."""
        return NORMS[self.norm](self.width)

    def core(self) -> nn.Module:
        if self.attention == "fused":
            return FusedAttention(causal=self.causal)
        if self.attention == "fused-2022":
            return EarlyFusedAttention(causal=self.causal)
        kernel = ScaledCoreAttention if self.attention == "scaled-scores" else CoreAttention
        kind = kernel if self.fused else EagerCoreAttention
        return kind(self.context, causal=self.causal, dropout=self.dropout)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """A linear layer that adds its own bias."""
        return (nn.Linear if self.fused else EagerLinear)(inputs, outputs, bias=self.bias)

    def activation(self) -> nn.Module:
        """The perceptron's function."""
        approximate = "tanh" if self.causal else "none"  # as GPT-2 and Megatron have it, and BERT
        return nn.GELU(approximate) if self.fused else EagerGELU(approximate)

    def residual_sum(self) -> nn.Module:
        """What adds a branch to the stream."""
        kind = ResidualSum if self.fused else EagerSum
        return kind(self.width, dropout=self.dropout, bias=self.bias)


class GroupedAttention(nn.Module):
    """Self-attention, [N, T, width] -> [N, T, width]; `group` heads of queries share one of keys and values.

    The rows of `qkv` are those of one head of keys after the other: its queries, its key, its value. The number of
    heads is computed from its output, so that a process that holds some rows runs the same forward.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.group = shape.heads // shape.kv_heads
        self.positions = shape.positions
        rows = shape.kv_heads * (self.group + 2) * self.head_width
        self.qkv = shape.linear(shape.width, rows)
        self.core = shape.core()
        self.output = nn.Linear(shape.width, shape.width, bias=False)  # its bias is in the sum behind it

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, self.group + 2, self.head_width))  # [N, T, key heads, group + 2, d]
        query, key, value = (
            part.flatten(2, 3).transpose(1, 2) for part in heads.split((self.group, 1, 1), dim=3)
        )  # [N, heads, T, d]
        if self.positions == "rotary":
            query, key = rotary(query, 1.0), rotary(key, 1.0)
        out: Tensor = self.output(self.core(query, key, value))
        return out


class Perceptron(nn.Module):
    """Widen, GELU, narrow: [N, T, width] -> [N, T, width]."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.widen = shape.linear(shape.width, shape.hidden)
        self.gelu = shape.activation()
        self.narrow = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.gelu(self.widen(x)))
        return out


class GatedPerceptron(nn.Module):
    """SiLU of a gate times what it gates (Shazeer 2020), narrow: [N, T, width] -> [N, T, width].

    The rows of `gates` are pairs: a hidden unit's gate, and what it gates.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gates = shape.linear(shape.width, 2 * shape.hidden)
        self.silu = nn.SiLU()
        self.narrow = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, gated = self.gates(x).unflatten(-1, (-1, 2)).unbind(-1)
        out: Tensor = self.narrow(self.silu(gate) * gated)
        return out


class ResidualBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each branch dropped out: [N, T, width] -> [N, T, width]."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.attention_norm = shape.normalisation()
        self.attention = GroupedAttention(shape)
        self.attention_sum = shape.residual_sum()
        self.mlp_norm = shape.normalisation()
        self.mlp = (GatedPerceptron if shape.gated else Perceptron)(shape)
        self.mlp_sum = shape.residual_sum()
        initialise(self, ("attention.output", "mlp.narrow"), shape.depth)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_sum(x, self.attention(self.attention_norm(x)))
        out: Tensor = self.mlp_sum(x, self.mlp(self.mlp_norm(x)))
        return out


def blocks(shape: BlockShape) -> list[Callable[[], nn.Module]]:
    return [partial(ResidualBlock, shape)] * shape.depth
