"""Cross entropy as a sum and a count: its mean is over the targets that are not ignored.

Micro-batches of a minibatch may have unequal numbers of those.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import UsageError
from stretto.nn.batch import IGNORED
from stretto.options.checks import MOST, number, of_fields, whole


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


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossEntropy:
    """torch's cross entropy, or its `nll_loss`, with their options; called, it is the mean that torch computes.

    The mean divides by the number of targets other than `ignore_index`, or by the sum of their classes' weights.
    `tokens`: output [N, T, V] and target [N, T], as in language models; None: where shapes are such. `shift`: the
    target is the input itself, and the output at position t is compared with the token at t + 1 (Hugging Face's
    `labels`).
    """

    function: Callable[..., Tensor] = functional.cross_entropy
    weight: Tensor | None = None
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    tokens: bool | None = False
    shift: bool = False

    def __post_init__(self) -> None:
        of_fields("CrossEntropy: ", self)
        whole("CrossEntropy: ignore_index", self.ignore_index, -MOST, MOST - 1)
        number("CrossEntropy: label_smoothing", self.label_smoothing, 0, math.nextafter(1, 2))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self._reduced(*self._flat(output, target), "mean")

    def value(self, output: Tensor, target: Tensor, *, counted: bool) -> Tensor | Sum:
        """The sum and the count if `counted` and the targets are class indices; else the mean."""
        if not counted or (isinstance(target, Tensor) and target.is_floating_point()):
            return self(output, target)
        total, number = self.sum_and_count(output, target)
        count = as_count(number, total)
        assert count is not None, "a number of targets, or a sum of their weights"
        return Sum(total, count)

    def sum_and_count(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the targets that count, and their number or the sum of their classes' weights.

        Targets are class indices, not probabilities.
        """
        output, target = self._flat(output, target)
        counts = target != self.ignore_index
        count = counts.sum() if self.weight is None else self.weight.to(target.device)[target[counts]].sum()
        return self._reduced(output, target, "sum"), count

    def uneven(self, target: Any) -> bool:
        """Whether parts of these targets may have different counts, so that a sum and a count are needed."""
        if not isinstance(target, Tensor) or target.is_floating_point():
            return False
        return self.weight is not None or bool((target == self.ignore_index).any())

    def computed_by(self, function: Callable[..., Tensor]) -> "CrossEntropy":
        """The same with another function."""
        return replace(self, function=function)

    def aligned(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs with the targets that each of them is compared with."""
        return (output[:, :-1], target[:, 1:]) if self.shift else (output, target)

    def _flat(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output, target = self.aligned(output, target)
        tokens = output.dim() == 3 and output.shape[:2] == target.shape if self.tokens is None else self.tokens
        return (output.flatten(0, 1), target.flatten()) if tokens else (output, target)

    def _reduced(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        options = {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}
        weight = None if self.weight is None else self.weight.to(output.device, output.dtype)
        return self.function(
            output, target, weight=weight, ignore_index=self.ignore_index, reduction=reduction, **options
        )


class CrossEntropyOfModule(CrossEntropy):
    """That of a torch module, with the options that it has now: class weights may change while a network trains."""

    module: nn.Module

    def __init__(self, function: Callable[..., Tensor], module: nn.Module) -> None:
        super().__init__(function=function)
        object.__setattr__(self, "module", module)

    def __getattribute__(self, name: str) -> Any:
        if name in _OPTIONS:
            module = object.__getattribute__(self, "__dict__").get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
        return object.__getattribute__(self, name)

    def computed_by(self, function: Callable[..., Tensor]) -> CrossEntropy:
        """The same with another function."""
        return CrossEntropyOfModule(function, self.module)

    def _reduced(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        if self.module.reduction != "mean":
            raise UsageError(
                f"the loss has reduction={self.module.reduction!r} now, and had 'mean' when the Trainer was made: make "
                "another Trainer, which may go on with this one's weights"
            )
        return super()._reduced(output, target, reduction)


token_cross_entropy = CrossEntropy(tokens=True)
"""Mean cross entropy in nats over all tokens except targets of -100: output [N, T, V], target [N, T]."""

next_token_cross_entropy = CrossEntropy(tokens=True, shift=True)
"""The same where the target is Hugging Face's `labels`: position t is compared with the label of position t + 1."""

_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_MODULES = {nn.CrossEntropyLoss: functional.cross_entropy, nn.NLLLoss: functional.nll_loss}
_OPTIONS = frozenset({"weight", "ignore_index", "label_smoothing"})


def recognise(loss: Any) -> CrossEntropy | None:
    """The `CrossEntropy` of torch's own mean loss: a function, a partial of one, or a module. None for other losses."""
    if any(loss is function for function in _FUNCTIONS):  # no ==, which may be a metric's own
        return CrossEntropy(function=loss)
    if isinstance(loss, functools.partial) and loss.func in _FUNCTIONS and not loss.args:
        options = {name: value for name, value in loss.keywords.items() if (name, value) != ("reduction", "mean")}
        return CrossEntropy(function=loss.func, **options) if options.keys() <= _OPTIONS else None
    function = _MODULES.get(type(loss))
    if function is None or loss.reduction != "mean":
        return None
    return CrossEntropyOfModule(function, loss)
