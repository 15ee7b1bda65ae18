"""The operators of a transformer block one by one, as a program runs them that fuses none: BERT of 2019, for example.

Each adds a bias, scales scores, masks them, drops out or adds to the stream in a pass of its own over memory, and GELU
is five. They compute what the operators of residual_block.py, core_attention.py and fused_operators.py do.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from stretto.models.core_attention import CoreAttention, Dropout


class EagerLinear(nn.Linear):
    """nn.Linear that adds its bias behind the product, as torch did until 2020 to tensors of three dims."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to each token."""
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
        """Add the branch to the stream."""
        whole = branch if self.bias is None else branch + self.bias
        out: Tensor = residual + self.dropout(whole)
        return out
