"""Cross entropy as a sum and a count: its mean is over the targets that are not ignored.

Micro-batches of a minibatch may have unequal numbers of those.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import UsageError
from stretto.losses.sums import Sum, as_count
from stretto.nn.batch import IGNORED
from stretto.options.checks import of_fields


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

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the targets that count."""
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
