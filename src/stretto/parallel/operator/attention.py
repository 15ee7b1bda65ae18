"""torch.nn.MultiheadAttention with some of its heads.

Torch's styles cannot cut it: query, key and value share one packed weight, and its forward wants all heads. Here each
process holds the rows of its heads in each third of that weight, under the same name, and their columns of the output.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.exchange import join, leave
from stretto.parallel.operator.piece import Piece, keep
from stretto.parallel.operator.randomness import draw_apart
from stretto.parallel.operator.role import Role
from stretto.parallel.operator.span import Between, WholeActivations


def share(attention: nn.MultiheadAttention, role: Role, axis: Axis, between: Between | None = None) -> None:
    """Give an attention its heads: role.sizes of them on each process. It takes and gives what is `between`: wholes."""
    rows = tuple(size * attention.head_dim for size in role.sizes)
    for name in ("in_proj_weight", "in_proj_bias"):
        keep(attention, name, Piece(axis, 0, rows, blocks=3))
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        keep(attention, name, Piece(axis, 0, rows))
    for name in ("bias_k", "bias_v"):
        keep(attention, name, Piece(axis, 2, rows))
    keep(attention.out_proj, "weight", Piece(axis, 1, rows))
    attention.__class__ = Heads
    # Torch's fused inference reads the packed weight as that of all heads; it steps aside where this says False.
    attention.__dict__.update(
        axis=axis, sizes=role.sizes, between=between or WholeActivations(axis), _qkv_same_embed_dim=False
    )
    if attention.dropout:
        draw_apart(attention, axis)


class Heads(nn.MultiheadAttention):
    """Some of the heads; what goes in and out is whole, or a part of the sequence."""

    axis: Axis
    sizes: tuple[int, ...]
    between: Between

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
        """As torch's own; [T, N, E], [N, T, E] with batch_first, or [T, E]."""
        single = query.ndim == 2
        q, k, v = self.projected(*(self.laid(x, single) for x in entered((query, key, value), self.between)))
        if single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        mixed, weights = self.mixed(q, k, v, self.mask(attn_mask, key_padding_mask, q, k), need_weights)
        out = F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight)
        out = self.between.leave(out[0] if single else out if self.batch_first else out.transpose(0, 1))
        if self.out_proj.bias is not None:
            out = out + self.between.used(self.out_proj.bias)
        told = None if weights is None else self.told(weights, average_attn_weights)
        return out, told[0] if single and told is not None else told

    def laid(self, x: Tensor, single: bool) -> Tensor:
        """An input as [N, T, E], however it is given."""
        if single:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the own heads, [N, heads, T, head_dim]; key and value with their extra rows."""
        packed = self.in_proj_weight
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (self.between.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """What is added to the scores: [N or 1, own heads or 1, T, S]; extra keys are open to all."""
        parts = []
        if attention is not None:
            whole = attention.ndim == 3
            own = attention.reshape(-1, self.num_heads, *attention.shape[1:]) if whole else attention[None, None]
            first = sum(self.sizes[: self.axis.rank])
            parts.append(own[:, first : first + q.size(1)] if whole else own)
        if padding is not None:
            parts.append(padding[:, None, None])
        total = None
        for each in parts:
            added = (
                torch.zeros_like(each, dtype=q.dtype).masked_fill(each, -torch.inf)
                if each.dtype == torch.bool
                else each
            )
            added = F.pad(added, (0, k.size(2) - added.size(-1)))
            total = added if total is None else total + added
        return total

    def mixed(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The values of each head, and what they were weighted with."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout), None
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        return weights @ v, weights

    def told(self, weights: Tensor, average: bool) -> Tensor:
        """The weights of all heads, [N, heads, T, S], or their mean."""
        if average:
            total: Tensor = leave(weights.sum(1), self.axis) / self.num_heads
            return total
        return join(weights, self.axis, 1, self.sizes)


def entered(inputs: tuple[Tensor, ...], between: Between) -> list[Tensor]:
    """What every process has, about to meet weights of its own; the same tensor only once."""
    met = {id(x): x for x in inputs}
    met = {key: between.enter(x) for key, x in met.items()}
    return [met[id(x)] for x in inputs]
