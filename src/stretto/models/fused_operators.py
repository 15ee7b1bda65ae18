"""Operators that large models run as one kernel and torch on a CPU as several.

RMS normalisation, rotary positions, and the sum of a residual stream and a branch that is dropped out. Costs are read
off the operators that run, on a CPU: written with torch's own, an RMS norm would seem to read and write its input ten
times, and to keep it four times. As operators of their own these read what they take once, and write once.
"""

import torch
from torch import Tensor, library, nn


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
    """The gradients of x and of the weight."""
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
        """Add the branch to the stream."""
        out: Tensor = dropped_sum(residual, branch, self.bias, self.dropout if self.training else 0.0)[0]
        return out


class RMSNorm(nn.Module):
    """nn.RMSNorm as one operator: it keeps its input, and one number of each token."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        out: Tensor = rms_norm(x, self.weight, self.eps)[0]
        return out
