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
    """The optimizer that the user's function makes. Raises UsageError for anything else, and for LBFGS."""
    check_optimizer(optimizer)
    expected = "a function of parameters, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
    built = called("optimizer", optimizer, parameters, wanted=expected)
    if not isinstance(built, torch.optim.Optimizer):
        hint = " Does the function end with return?" if built is None else ""
        hint = " A stage has one, with several groups if need be." if isinstance(built, list | tuple) else hint
        raise UsageError(f"optimizer returned {shown(built)}, not a torch.optim.Optimizer.{hint} Give {expected}")
    if "closure" in inspect.signature(built.step).parameters and isinstance(built, torch.optim.LBFGS):
        raise UsageError("LBFGS evaluates the loss several times a step; a pipeline cannot. Choose another optimizer")
    return built
