"""A sum over targets and how many of them count: what a mean is made of once the whole minibatch has been seen."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A sum over a batch's targets, and how many of them count (or how much): `count` is float64, without gradient."""

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """Sum over count; 0 where nothing counts."""
        return self.total / torch.where(self.count > 0, self.count, 1.0).to(self.total.dtype)

    @property
    def pair(self) -> Tensor:
        """Both numbers, [2], float64: what is told of a micro-batch's loss."""
        return torch.stack((self.total.detach().to(torch.float64), self.count))


def as_count(value: Any, like: Tensor) -> Tensor | None:
    """A count as a float64 number on the device of `like`; None for what is no number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real | Tensor):
        return None
    count = torch.as_tensor(value).detach().to(like.device, torch.float64)
    if count.numel() != 1:
        return None
    readable = type(count) is Tensor and count.device.type == "cpu"  # a device would have to be waited for
    return count.reshape(()) if not readable or 0 <= float(count) < float("inf") else None


def divided(value: Sum, whole: Tensor, share: float) -> Tensor:
    """A replica's mean, from its sum: times its `share` of the minibatch, its gradient is that of the minibatch's mean.

    `whole` is the count of all replicas' sums together. It may be told only after this, in place: the backward reads
    it. Nothing counted gives no gradient.
    """
    mean: Tensor = Divided.apply(value.total, value.count, whole, share)  # type: ignore[no-untyped-call]
    return mean


class Divided(torch.autograd.Function):
    """The operation of `divided`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, whole: Tensor, share: float) -> Tensor:
        """The mean over what this replica counts."""
        ctx.whole, ctx.share = whole, share
        return Sum(total, count).mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Over this replica's share of the count of all."""
        (gradient,) = gradients
        divisor = (ctx.whole * ctx.share).to(gradient.dtype)
        return torch.where(divisor > 0, gradient / divisor, torch.zeros_like(gradient)), None, None, None
