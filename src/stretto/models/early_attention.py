"""Fused attention as its first kernels computed it, which attain less of a GPU than those of FlashAttention-2.

MPT was trained with such a kernel, FlashAttention in Triton, in 2022 and 2023. The numbers are those of torch's
scaled_dot_product_attention; only the name of the operator, by which plans price it, is another one.
"""

from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import shape_wrapper

from stretto.models.core_attention import repeated
from stretto.nn.flop_counter import FORMULAS, attention, attention_backward


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


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.is_causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    of_query, of_key, of_value = attention_2022_backward(gradient, *ctx.saved_tensors, ctx.is_causal)
    return of_query, of_key, of_value, None


attention_2022.register_autograd(_gradients, setup_context=_keep)
FORMULAS[torch.ops.stretto.attention_2022] = shape_wrapper(attention)  # type: ignore[no-untyped-call]
FORMULAS[torch.ops.stretto.attention_2022_backward] = shape_wrapper(attention_backward)  # type: ignore[no-untyped-call]


class EarlyFusedAttention(nn.Module):
    """FusedAttention (core_attention.py) by the kernels of 2022: it keeps no scores, and drops none out."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix the values of each head."""
        mixed: Tensor = attention_2022(query, key, value, self.causal)[0]
        return mixed.transpose(1, 2).flatten(2)
