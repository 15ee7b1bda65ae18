"""Self-attention as libraries for images write it, whose copies between projections and heads cost time on a GPU.

Both are [N, T, width] -> [N, T, width], and compute what `GroupedAttention` (residual_block.py) does. `qkv` has the
rows of all queries, then all keys, then all values. The output's bias is in the sum behind it, as there.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.models.core_attention import FusedAttention

if TYPE_CHECKING:
    from stretto.models.residual_block import BlockShape


class JoinedAttention(nn.Module):
    """What both have: one projection to queries, keys and values, the core, and the projection of its output."""

    def __init__(self, shape: "BlockShape") -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = shape.linear(shape.width, 3 * shape.width)
        self.core = shape.core()
        self.output = nn.Linear(shape.width, shape.width, bias=False)


class UnboundAttention(JoinedAttention):
    """Attention as timm has it: one tensor [3, N, heads, T, d], of which queries, keys and values are views.

    Its backward stacks three gradients, and copies them to the order of the projection's output.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token to all."""
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = self.output(self.core(query, key, value))
        return out


class GradientLikeValue(torch.autograd.Function):
    """A view of a tensor whose gradient lies in memory as it does, as FlashAttention-2 gives it (`empty_like`).

    A CPU's kernel gives another order, from which copies would be counted: where tensors have no numbers, which order a
    gradient has is said here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The tensor."""
        ctx.layout = x.shape, x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Its gradient, in the same order."""
        return gradient.new_empty_strided(*ctx.layout) if has_no_numbers(gradient) else gradient


def has_no_numbers(x: Tensor) -> bool:
    """Whether a tensor is one of those that only costs are counted with."""
    return x.is_meta or type(x) is not Tensor


class PackedAttention(JoinedAttention):
    """Attention as torch.nn.MultiheadAttention has it, of one input with examples first: tokens come first inside.

    Queries, keys and values are copied out of the projection's output, and taken by their index: its backward fills a
    tensor of all three for each, and adds these (torch/nn/functional.py, `_in_projection_packed`).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token to all."""
        examples, tokens, width = x.shape
        packed = self.qkv(x.transpose(0, 1)).unflatten(2, (3, width)).movedim(2, 0).contiguous()  # [3, T, N, width]
        query, key, value = (
            part.view(tokens, examples * self.heads, -1).transpose(0, 1).view(examples, self.heads, tokens, -1)
            for part in (packed[0], packed[1], packed[2])
        )
        if isinstance(self.core, FusedAttention):
            query, key, value = map(GradientLikeValue.apply, (query, key, value))
        mixed = self.core(query, key, value).transpose(0, 1).contiguous()  # [T, N, width]
        out: Tensor = self.output(mixed).transpose(0, 1)
        return out
