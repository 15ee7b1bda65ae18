"""The value of a loss: a mean over examples, or a sum and a count.

Micro-batches and replicas each see a part of a minibatch. A mean over examples is the sum of the parts' means, each
times the part's share of the examples. That fails for a mean over tokens that are not ignored, or one with class
weights, as the parts have different counts. So a loss may return `(sum, count)`, and training divides by the count of
the whole minibatch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import UsageError
from stretto.losses.cross_entropy import (
    CrossEntropy,
    Sum,
    as_count,
    next_token_cross_entropy,
    recognise,
    token_cross_entropy,
)
from stretto.nn.batch import IGNORED
from stretto.options.checks import flag, function
from stretto.options.import_object import import_object, is_function, unknown

Loss = Callable[[Any, Any], Any]  # (output, target) -> mean over the examples, or (sum, count)
ELEMENTWISE = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
ELEMENTWISE_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


@dataclass(frozen=True, eq=False)
class MeanOverExamples:
    """A loss that the user declares to be a mean over examples."""

    loss: Loss

    def __call__(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


@dataclass(frozen=True, eq=False)
class MeanOfStage:
    """A mean over examples that knows whose output it gets: `of(stage)` is the loss of that stage's head or output.

    `loss` is the one of the model's output in evaluation. `trial` is `of` for checks: a call of it leaves no trace.
    `remedy` says what to change where it turns out to be no mean over examples.
    """

    loss: Loss
    of: Callable[[int], Loss]
    trial: Callable[[int], Loss]
    remedy: str

    def __call__(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


@dataclass(frozen=True, eq=False)
class CheckedLoss:
    """A loss to be called by checks, and what to say where it is no mean over examples."""

    loss: Loss
    remedy: str

    def __call__(self, output: Any, target: Any) -> Any:
        return self.loss(output, target)


def of_stage(loss: Loss, stage: int) -> Loss:
    return loss.of(stage) if isinstance(loss, MeanOfStage) else loss


def trial_of_stage(loss: Loss, stage: int) -> Loss:
    return CheckedLoss(loss.trial(stage), loss.remedy) if isinstance(loss, MeanOfStage) else loss


def mean(loss: Loss) -> MeanOverExamples:
    """Declare that `loss` is a mean over the examples of a batch, for any targets: Trainer then does not check it.

    For a loss whose value on a batch is the mean of its values on each example. A mean over tokens is one only if all
    examples have the same number of tokens that count. Raises UsageError if `loss` cannot be called.
    """
    if not callable(loss):
        raise UsageError(f"stretto.mean({loss!r}): give a function (output, target) -> mean loss over the examples")
    return MeanOverExamples(loss)


def understand(loss: Loss) -> Loss:
    """The loss as a `CrossEntropy` if it is torch's own cross entropy; any other loss as it is."""
    return recognise(loss) or loss


def call(loss: Loss, output: Any, target: Any, *, counted: bool = True) -> Tensor | Sum:
    """The loss's value: a scalar tensor, or a `Sum`. A `CrossEntropy` returns a `Sum` if `counted`, else its mean.

    Raises UsageError if the loss returns neither one number as a tensor, nor (sum, count).
    """
    flag("counted", counted)
    return value_function(loss)(output, target, counted=counted)


def value_function(loss: Loss) -> Callable[..., Tensor | Sum]:
    """`call` with this loss: what a stage calls with (output, target, counted=...) for each micro-batch."""
    if isinstance(loss, CrossEntropy):
        return loss.value
    function("loss", loss, "a function (output, target) -> mean loss over the examples, or (sum, count)")
    return partial(checked_value, unbroadcast(loss) if is_elementwise(loss) else loss)


def is_elementwise(loss: Loss) -> bool:
    """Whether a loss is one of torch's that compare entry by entry, and stretch a target of another shape to fit."""
    return any(loss is function for function in ELEMENTWISE) or isinstance(loss, ELEMENTWISE_MODULES)


def unbroadcast(loss: Loss) -> Loss:
    """The loss for targets of the output's shape. It raises UsageError for others, of which torch only warns."""

    def function(output: Any, target: Any) -> Any:
        if isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape != target.shape:
            remedy = ": give target.unsqueeze(-1)" if output.shape == (*target.shape, 1) else ""
            raise UsageError(
                f"the loss got output {list(output.shape)} and target {list(target.shape)}, and would compare every "
                f"entry of one with others of the other: let both have one shape{remedy}"
            )
        return loss(output, target)

    return function


def checked_value(loss: Loss, output: Any, target: Any, *, counted: bool) -> Tensor | Sum:
    """The value of a loss that is no `CrossEntropy`, which decides by itself whether it is a sum and a count."""
    value = loss(output, target)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor) and value[0].numel() == 1:
        count = as_count(value[1], value[0])
        if count is not None:
            return Sum(value[0].reshape(()), count)
    raise UsageError(
        f"the loss returned {described(value)}: return a tensor with one number, the mean over the batch's examples, "
        f"or (sum, count), a sum over the batch and the number to divide by, at least 0{_hint(value)}"
    )


def _hint(value: Any) -> str:
    # What was probably meant, in words that end the message.
    if value is None:
        return ". Does the function end with return?"
    if isinstance(value, Tensor):
        return ". torch's losses return a mean with reduction='mean'" if value.dim() else ""
    if isinstance(value, float | int) or type(value).__module__ == "numpy":
        return ". A number without a gradient trains nothing: return the tensor itself, without .item()"
    return ""


def described(value: Any) -> str:
    """A loss's return value as text, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(described, value)) + ")"
    return repr(value)[:80]


def mean_and_weight(loss: Loss, output: Any, target: Any, examples: int) -> tuple[Tensor, float]:
    """The mean over a batch, and the batch's weight among others: its count, or its number of examples."""
    value = call(understand(loss), output, target)
    return (value.mean, float(value.count)) if isinstance(value, Sum) else (value, float(examples))


AUTO = "auto"
OWN: Mapping[str, Loss] = {
    "token_cross_entropy": token_cross_entropy,
    "next_token_cross_entropy": next_token_cross_entropy,
}


def named_loss(text: str) -> Loss:
    """The loss `text`: the name of one, or package.module:function or path/to/file.py:function.

    An nn.Module is a loss, too, and so is a class of such. Raises UsageError for any other name.
    """
    if is_function(text):
        loss = import_object(text, "loss")
        if isinstance(loss, type) and issubclass(loss, nn.Module):
            loss = loss()
        if not callable(loss):
            raise UsageError(f"loss {text!r} is no function: give one that takes (output, target)")
        return loss  # type: ignore[no-any-return]
    known = {**OWN, **of_torch()}
    if text not in known:
        raise unknown("loss", text, known)
    return known[text]


def of_torch() -> dict[str, Loss]:
    """The losses of torch.nn.functional that take (input, target), by name."""
    functions = {name: getattr(functional, name) for name in dir(functional) if not name.startswith("_")}
    return {name: function for name, function in functions.items() if takes_two(function)}


def takes_two(function: Any) -> bool:
    """Whether a function takes an input, a target and a reduction, and needs nothing else."""
    if not inspect.isfunction(function):
        return False
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return needed == ["input", "target"] and "reduction" in names


def suitable_loss(x: Any, y: Any, data: str, *, named: bool = False) -> Loss:
    """The loss for examples with these targets where none is named: cross entropy, if targets are classes or tokens.

    Where the targets are Hugging Face's `labels`, a copy of `input_ids`, each position predicts the next token. Raises
    UsageError for all other targets. `named`: examples are dicts, although a single input comes without its name.
    """
    if not isinstance(y, Tensor) or y.dtype != torch.int64:
        kind = f"{y.dtype} {list(y.shape[1:])}" if isinstance(y, Tensor) else type(y).__name__
        raise UsageError(
            f"loss is missing: the targets of {data} are {kind}, no classes; give --loss, one of torch.nn.functional "
            "(mse_loss, l1_loss, binary_cross_entropy_with_logits, ...) or path/to/file.py:function"
        )
    tokens = x.get("input_ids") if isinstance(x, Mapping) else x
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or y.dim() != 2 or tokens.shape != y.shape:
        return CrossEntropy(tokens=None)
    if not ((y == tokens) | (y == IGNORED)).all() or not (y == tokens).any():
        return CrossEntropy(tokens=None)
    if not named and not isinstance(x, Mapping):
        raise UsageError(
            f"loss is missing: the targets of {data} are a copy of its inputs, {list(x.shape[1:])} tokens; give --loss "
            "next_token_cross_entropy if each position predicts the next token, token_cross_entropy if it predicts its "
            "own"
        )
    return next_token_cross_entropy
