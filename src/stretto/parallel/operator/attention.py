"""torch.nn.MultiheadAttention with some of its heads.

torch's styles cannot cut it: query, key and value share one packed weight, and its forward needs all heads. Here each
process holds, under the same names, the rows of its heads in each third of that weight, and their columns of the output
layer's weight.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.errors import UsageError
from stretto.parallel.operator.axis import Axis, join, leave
from stretto.parallel.operator.piece import Piece, keep_part
from stretto.parallel.operator.randomness import draw_apart
from stretto.parallel.operator.role import Role
from stretto.parallel.operator.span import Boundary, WholeActivations


def share(attention: nn.MultiheadAttention, role: Role, axis: Axis, boundary: Boundary | None = None) -> None:
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
    """Some of an attention's heads; inputs and output are whole, or parts of the sequence."""

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
        for part in parts:
            added = (
                torch.zeros_like(part, dtype=q.dtype).masked_fill(part, -torch.inf)
                if part.dtype == torch.bool
                else part
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
