"""The optimizer that a user's function makes, checked."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.options.checks import shown
from stretto.options.user_errors import called


def check_optimizer(optimizer: Any) -> None:
    """Raise UsageError for what is no function, such as an optimizer of the whole network."""
    if not callable(optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}: each stage has its own, so give a function of the parameters, "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )


def build_optimizer(optimizer: Callable[..., Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the user's function makes.

    Raises UsageError for anything else, and for one that evaluates the loss several times a step: LBFGS, SAM.
    """
    check_optimizer(optimizer)
    expected = "a function of parameters, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
    built = called("optimizer", optimizer, parameters, wanted=expected)
    if not isinstance(built, torch.optim.Optimizer):
        hint = " Does the function end with return?" if built is None else ""
        hint = " A stage has one, with several groups if need be." if isinstance(built, list | tuple) else hint
        raise UsageError(f"optimizer returned {shown(built)}, not a torch.optim.Optimizer.{hint} Give {expected}")
    if takes_several_passes(built):
        raise UsageError(
            f"{type(built).__name__} evaluates the loss several times a step; a pipeline cannot. Choose another "
            "optimizer"
        )
    return built


def takes_several_passes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step needs the loss again: LBFGS, those whose `step` requires a closure, SAM and its kin.

    SAM's step is a `first_step`, which moves the weights, another backward and a `second_step`. Implementations that
    have these under other names are known by that of their class.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return (
        isinstance(optimizer, torch.optim.LBFGS)
        or (closure is not None and closure.default is closure.empty)
        or (hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"))
        or any("SAM" in kind.__name__ or "Sharpness" in kind.__name__ for kind in type(optimizer).__mro__)
    )
