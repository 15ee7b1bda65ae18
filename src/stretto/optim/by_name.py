"""The optimizer that a setting names (of the table, another of torch.optim, a user's function), and the name of one."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError, nearest
from stretto.methods.findings import PLAIN_SGD
from stretto.optim.from_function import NamedOptimizer, build_optimizer, check_optimizer
from stretto.optim.muon_with_adamw import CombinedOptimizer
from stretto.optim.parameter_labels import labelled_by
from stretto.optim.traits import has_plain_momentum
from stretto.optimizers import OPTIMIZERS, OTHERS, Optimizer
from stretto.options.checks import shown
from stretto.options.import_object import import_object, is_function, unknown

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ANY_RATE = 1e-3
UNFIT = {row.place.partition(":")[2]: row.unfit for row in OTHERS if row.unfit}


def optimizer_row(name: str) -> Optimizer:
    """The row of the table, or one like it for any other optimizer: its default rate, a third and three times of it.

    A function of the user's has the default of its argument `lr`, if it has one, as its only rate. Raises UsageError
    for an unknown name, and for an optimizer that cannot train stages.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if is_function(name):
        rate = parameters_of(import_object(name, "optimizer")).get("lr", inspect.Parameter.empty)
        return Optimizer(name, rates=(rate,) if isinstance(rate, int | float) else ())
    kind = class_of(name)
    rate = parameters_of(kind)["lr"]
    steps = (rate / 3, rate, rate * 3) if isinstance(rate, int | float) else ()
    return Optimizer(f"torch.optim:{kind.__name__}", rates=tuple(float(f"{step:.2g}") for step in steps))


def takes_rate(name: str) -> bool:
    """Whether an optimizer's function has an argument `lr`."""
    return "lr" in parameters_of(import_object(optimizer_row(name).place, "optimizer"))


def needs_rate(name: str) -> bool:
    """Whether an optimizer's function has an argument `lr` without a default, so that somebody has to give a rate."""
    return parameters_of(import_object(optimizer_row(name).place, "optimizer")).get("lr") is inspect.Parameter.empty


def usual_rate(name: str) -> float | None:
    """A rate for an optimizer of which only the kind or the state is asked; None if its function takes no `lr`."""
    return next(iter(optimizer_row(name).rates), ANY_RATE if takes_rate(name) else None)


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """The class of torch.optim with this name, in capitals or not."""
    classes = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    found = next((key for key in classes if key.lower() == name.lower()), None)
    if found is None or found in UNFIT:
        fitting = [*OPTIMIZERS, *(key.lower() for key in classes if key not in UNFIT and key.lower() not in OPTIMIZERS)]
        if found is None:
            raise unknown("optimizer", name, fitting)
        raise UsageError(f"optimizer {name} cannot train stages ({UNFIT[found]}): {nearest(name, fitting)}")
    return classes[found]


def parameters_of(function: Any) -> dict[str, Any]:
    """The arguments of an optimizer's class or function beyond the first, with their defaults."""
    if not callable(function):
        raise UsageError(f"optimizer {shown(function)} is no function: give one that takes parameters, and lr=")
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise UsageError(f"optimizer {shown(function)} takes no arguments: give one that takes parameters, and lr=")
    return {parameter.name: parameter.default for parameter in parameters[1:]}


def make_optimizer(name: str, lr: float | None, momentum: float | None, weight_decay: float) -> MakeOptimizer:
    """A function from the parameters of a stage to its optimizer.

    `momentum` is the first beta where there are betas; None leaves it at its default, as 0 leaves weight decay. Raises
    UsageError for one of them that the optimizer does not take.
    """
    place = optimizer_row(name).place
    function = import_object(place, "optimizer")
    takes = parameters_of(function)
    given: dict[str, Any] = {}
    if lr is not None:
        refuse_missing(name, "lr", lr, takes)
        given["lr"] = lr
    elif takes.get("lr") is inspect.Parameter.empty:
        raise UsageError(f"optimizer {name} needs a rate: give lr, as --lr 0.01 or lr=0.01, or its argument a default")
    if momentum is not None:
        key = "betas" if "betas" in takes and "momentum" not in takes else "momentum"
        refuse_missing(name, key, momentum, takes)
        given[key] = (momentum, second_beta(takes[key])) if key == "betas" else momentum
    if weight_decay or (name in OPTIMIZERS):
        refuse_missing(name, "weight_decay", weight_decay, takes)
        given["weight_decay"] = weight_decay
    return partial(function, **given)


def second_beta(default: Any) -> float:
    """The second one of default betas; 0.999 where there are none."""
    return float(default[1]) if isinstance(default, tuple | list) and len(default) == 2 else 0.999


def refuse_missing(name: str, key: str, value: object, takes: dict[str, Any]) -> None:
    """Raise UsageError for an option that the optimizer has no argument for."""
    if key not in takes:
        option = "momentum" if key == "betas" else key
        if is_function(name):
            raise UsageError(
                f"{option}={value}: optimizer {name} takes no {key}: give the function an argument of this name behind "
                f"the parameters, or leave {option} out"
            )
        raise UsageError(f"{option}={value}: optimizer {name} takes no {key}; it has {', '.join(takes) or 'none'}")


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer, in small letters, as the table has it; "plain-sgd" of an SGD without a velocity.

    A subclass of SGD is SGD: what reads a velocity reads its own.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd" if all(map(has_plain_momentum, optimizer.param_groups)) else PLAIN_SGD
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
