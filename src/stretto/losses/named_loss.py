"""The loss that a setting names: one of torch.nn.functional, one of Stretto's, or a function of the user's."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import UsageError, nearest
from stretto.losses.cross_entropy import CrossEntropy, next_token_cross_entropy, token_cross_entropy
from stretto.losses.value import Loss
from stretto.nn.batch import IGNORED
from stretto.options.import_object import import_object, is_function

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
        raise UsageError(f"unknown loss {text!r}: {nearest(text, known)}; or write path/to/file.py:function")
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
