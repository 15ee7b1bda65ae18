"""What decoders run where no kernel is fused: RMS norms and rotary positions by torch's operators, one by one.

They compute what fused_operators.py does in one kernel each. `Float32RMSNorm` is Hugging Face's Llama's, `PlainRMSNorm`
Aleph Alpha's (github.com/Aleph-Alpha/scaling at 737f855, core/nn/norm/rms_norm.py), `turned` what both have.
"""

import torch
from torch import Tensor

from stretto.models.fused_operators import RMSNorm


class PlainRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) times a weight over the last dim, in the type of x but for a cast there and back."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.float().type_as(x) * self.weight


class Float32RMSNorm(PlainRMSNorm):
    """The same in float32, cast back before the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def turned(x: Tensor) -> Tensor:
    """x [N, heads, T, d] with pairs (i, i + d/2) of each token turned, as `rotary` does; angles are made once a run."""
    length, width = x.shape[2:]
    rates = 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / -width)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=x.device), rates).repeat(1, 2)
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other = x.chunk(2, dim=3)
    return x * cosine + torch.cat([-other, one], dim=3) * sine
