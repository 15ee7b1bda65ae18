"""A loss as a sum over targets and the count of those targets, to be divided by the whole minibatch's count."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A sum over a batch's targets, and their number or total weight: `count` is a float64 scalar without gradient."""

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The sum divided by the count; the sum itself if the count is 0."""
        return self.total / torch.where(self.count > 0, self.count, 1.0).to(self.total.dtype)

    @property
    def pair(self) -> Tensor:
        """Sum and count [2], float64: the report of a micro-batch's loss."""
        return torch.stack((self.total.detach().to(torch.float64), self.count))


def as_count(value: Any, like: Tensor) -> Tensor | None:
    """A count as a float64 scalar on the device of `like`; None unless it is one finite number of at least 0.

    On a device other than the CPU the value is not checked, as that would wait for the device.
    """
    if isinstance(value, bool) or not isinstance(value, Real | Tensor):
        return None
    count = torch.as_tensor(value).detach().to(like.device, torch.float64)
    if count.numel() != 1:
        return None
    readable = type(count) is Tensor and count.device.type == "cpu"
    return count.reshape(()) if not readable or 0 <= float(count) < float("inf") else None


def divided(value: Sum, whole: Tensor, share: float) -> Tensor:
    """A replica's mean, whose gradient, times the replica's `share` of the minibatch, is that of the minibatch's mean.

    `whole` is the count of all replicas together. Only the backward reads it, so it may be written in place until then.
    With a count of 0 the gradient is 0.
    """
    mean: Tensor = Divided.apply(value.total, value.count, whole, share)  # type: ignore[no-untyped-call]
    return mean


class Divided(torch.autograd.Function):
    """The autograd function of `divided`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, whole: Tensor, share: float) -> Tensor:
        """The mean over this replica's count."""
        ctx.whole, ctx.share = whole, share
        return Sum(total, count).mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the sum: the mean's gradient divided by `share` times the count of all replicas."""
        (gradient,) = gradients
        divisor = (ctx.whole * ctx.share).to(gradient.dtype)
        return torch.where(divisor > 0, gradient / divisor, torch.zeros_like(gradient)), None, None, None
