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
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from stretto.models.core_attention import CoreAttention, FusedAttention
from stretto.models.eager_operators import (
    EagerCoreAttention,
    EagerGELU,
    EagerLinear,
    EagerSum,
    ScaledCoreAttention,
)
from stretto.models.early_attention import EarlyFusedAttention
from stretto.models.fused_operators import ResidualSum, RMSNorm, rotary
from stretto.models.transformer import initialise

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
        """The core of an attention."""
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
        """Attend from each token to the others, or to those before it."""
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
        """Apply the two layers to each token."""
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
        """Apply the layers to each token."""
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
        """Add both branches to the residual stream."""
        x = self.attention_sum(x, self.attention(self.attention_norm(x)))
        out: Tensor = self.mlp_sum(x, self.mlp(self.mlp_norm(x)))
        return out


def blocks(shape: BlockShape) -> list[Callable[[], nn.Module]]:
    """A recipe of all blocks."""
    return [partial(ResidualBlock, shape)] * shape.depth
