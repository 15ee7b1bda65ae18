"""Which optimizer of the table a user's function makes, or a setting names."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stretto.methods.advice import PLAIN_SGD
from stretto.optim.by_name import make_optimizer, usual_rate
from stretto.optim.combined import CombinedOptimizer
from stretto.optim.from_function import build_optimizer, check_optimizer
from stretto.optim.momentum import has_velocity
from stretto.optim.named import NamedOptimizer
from stretto.optim.parameter_labels import labelled_by
from stretto.optimizers import OPTIMIZERS


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer, in small letters, as the table has it; "plain-sgd" of an SGD without a velocity.

    A subclass of SGD is SGD: what reads a velocity reads its own.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd" if has_velocity(optimizer) else PLAIN_SGD
    return "muon" if isinstance(optimizer, CombinedOptimizer) else type(optimizer).__name__.lower()


def name_made_by(function: Callable[..., Any], stages: Sequence[Any]) -> str:
    """The name of what an optimizer function makes: that of a class; else of what it makes for a stage's parameters.

    `stages` may be functions that build modules: where no stage with parameters is known it is called for one matrix.
    Raises UsageError for what is no function, or makes no optimizer.
    """
    check_optimizer(function)
    made = function
    while isinstance(made, partial):
        made = made.func
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and not issubclass(made, torch.optim.SGD):
        return made.__name__.lower()
    modules = (stage for stage in stages if isinstance(stage, nn.Module))
    stage = next((each for each in modules if any(p.requires_grad for p in each.parameters())), None)
    stage = nn.Linear(2, 2, device="meta").to_empty(device="cpu") if stage is None else stage  # draws no numbers
    trained = {f"0.{name}": p for name, p in stage.named_parameters() if p.requires_grad}
    if isinstance(function, NamedOptimizer):
        function = function.named(list(trained))
    return name_of(build_optimizer(labelled_by(function, [stage]), list(trained.values())))


def name_of_setting(name: str, momentum: float | None = None, stages: Sequence[Any] = ()) -> str:
    """The name of what a setting names: of the table, any other of torch.optim, or "path/to/file.py:function".

    Without `momentum` that of the table, or the optimizer's own. `stages` as in `name_made_by`.
    """
    if momentum is None and name in OPTIMIZERS:
        momentum = OPTIMIZERS[name].momentum
    return name_made_by(make_optimizer(name, usual_rate(name), momentum, 0.0), stages)
