"""The core of attention: what mixes values by queries and keys, between the projections. It has no weights.

Two modules with the same call, both from queries [N, heads, T, d] and keys and values [N, key heads, T, d] to
[N, T, heads d]. Consecutive query heads share a key head.

`CoreAttention` makes the scores, as Megatron did in 2022. In 16 bits it keeps for the backward queries, keys and
values, and of each score 5 bytes: the softmax, the mask of its dropout, and what that leaves (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198, section 4). It is what selective recomputation runs again (section 5).
`FusedAttention` keeps no scores.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Dropout(nn.Dropout):
    """nn.Dropout as it runs on a GPU, on any device: its mask takes one byte an element.

    On a CPU, nn.Dropout keeps the mask in the type of its input, and so would the count of a plan, which is read off
    there.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training."""
        if not self.training or self.p == 0:
            return x
        dropped: Tensor = torch.native_dropout(x, self.p, True)[0]
        return dropped


class CoreAttention(nn.Module):
    """softmax(Q K' / sqrt(d) + mask), dropout, times V; the scores are made and kept.

    The mask [context, context] is added by the product that makes the scores, which are scaled by it, too: neither
    masking nor scaling makes another copy of them, as in Megatron's fused kernel. Without `causal` all tokens attend to
    all. Keys and values that several heads share are repeated for each.
    """

    recompute_selectively = True  # stretto/nn/layer_recompute.py
    mask: Tensor

    def __init__(self, context: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        mask = torch.full((context, context), -torch.inf).triu(1) if causal else torch.zeros(1, 1)
        self.register_buffer("mask", mask, persistent=False)
        self.dropout = Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, head_width = query.shape[2:]
        shared = query.shape[1] // key.shape[1]
        queries, keys, values = (
            x.flatten(0, 1) for x in (query, repeated(key, shared), repeated(value, shared))
        )  # each [N heads, T, d]
        mask = self.mask[:length, :length]
        mixed = torch.bmm(self.dropout(self.scores(queries, keys, mask).softmax(-1)), values)
        return mixed.view(*query.shape[:2], length, head_width).transpose(1, 2).flatten(2)

    def scores(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """The scores of [N heads, T, d] queries and keys, scaled and masked."""
        return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=queries.shape[2] ** -0.5)


class FusedAttention(nn.Module):
    """The same in one kernel, which computes scores anew in the backward. It drops none of them out.

    It is torch's scaled_dot_product_attention. Costs are read off its kernel on a CPU, which has no dropout: with it,
    scores would be made.
    """

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = fused_attention(query, key, value, causal=self.causal)
        return mixed.transpose(1, 2).flatten(2)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Attention in one kernel; on the meta device, which would make the scores, a CPU's."""
    if query.is_meta:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed: Tensor = kernel(query, key, value, 0.0, causal)[0]
        return mixed
    shares = key.shape[1] < query.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=shares)


def repeated(x: Tensor, times: int) -> Tensor:
    """[N, heads, T, d] -> [N, heads times, T, d], each head so many times in a row."""
    return x.repeat_interleave(times, 1) if times > 1 else x
