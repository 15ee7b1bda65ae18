"""Whether a state could have been saved by what is to load it: sums find what disks do, not what people write."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError

NUMBERS = (int, float)
NEEDED = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "alpha", "rho", "lr_decay"}
"""What an optimizer's groups have had in every version of torch; what came later torch sets where it is missing."""
MISFITS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """What the block cannot load is a UsageError that begins with `what`."""
    try:
        yield
    except MISFITS as error:
        raise UsageError(f"{what}: {error}") from error


def check_part(saved: Any, part: Any) -> None:
    """Raise ValueError where `saved` is no state of a module's, an optimizer's, a scheduler's or another's.

    What modules hold they check themselves.
    """
    if isinstance(part, torch.optim.Optimizer):
        check_optimizer(saved, part)
    elif not isinstance(part, nn.Module):
        check_like(saved, part.state_dict(), "state")


def check_updates(count: Any) -> None:
    """Raise ValueError for what is no number of updates."""
    if type(count) is not int or count < 0:
        raise ValueError(f"updates is {count!r}")


def check_like(saved: Any, own: Any, where: str) -> None:
    """Raise ValueError, naming the place, where `saved` is of another kind than `own`.

    Tensors have the same shape, what both mappings or sequences have is alike. Where there is nothing yet (None, an
    empty mapping), anything may stand.
    """
    if own is None:
        return
    if isinstance(own, Tensor):
        _check_tensor(saved, own, where)
    elif isinstance(own, Mapping):
        _check(isinstance(saved, Mapping), saved, own, where)
        for key in own.keys() & saved.keys():
            check_like(saved[key], own[key], f"{where}.{key}")
    elif isinstance(own, list | tuple):
        _check(isinstance(saved, list | tuple), saved, own, where)
        for index, (theirs, mine) in enumerate(zip(saved, own, strict=False)):
            check_like(theirs, mine, f"{where}.{index}")
    elif isinstance(own, bool):
        _check(isinstance(saved, bool), saved, own, where)
    elif isinstance(own, NUMBERS):
        _check(isinstance(saved, NUMBERS) and not isinstance(saved, bool), saved, own, where)
    elif isinstance(own, str):
        _check(isinstance(saved, str), saved, own, where)


def check_optimizer(saved: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a state that is none of this optimizer: of what it keeps of parameters it has no example."""
    check_like(saved, {**optimizer.state_dict(), "state": {}}, "optimizer")
    for theirs, mine in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        if missing := sorted(NEEDED & mine.keys() - theirs.keys()):
            raise ValueError(f"optimizer.param_groups has no {missing[0]}")
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        each = saved["state"].get(number, {})
        _check(isinstance(each, Mapping), each, {}, f"optimizer.state.{number}")
        for name, value in each.items():
            check_kept(value, parameter, optimizer, f"optimizer.state.{number}.{name}", counts=name == "step")


def check_kept(value: Any, parameter: Tensor, optimizer: torch.optim.Optimizer, where: str, *, counts: bool) -> None:
    """Raise ValueError for what an optimizer cannot keep of a parameter.

    torch's own keep one number or one for each element, but for Adafactor's rows and columns and what LBFGS keeps of
    all at once; of others nothing is known.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith(("torch.optim", "stretto.optim")) or kind.__name__ in ("Adafactor", "LBFGS"):
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            _check_tensor(value, parameter, where)
    elif not (value is None or (counts and type(value) in NUMBERS)):
        raise ValueError(f"{where} is {value!r}")


def check_weights(saved: Any, own: Mapping[str, Any], module: nn.Module) -> None:
    """Raise ValueError for what a choice of weights cannot keep: tensors by the names of parameters, and counts."""
    check_like(saved, own, "weights")
    shapes = dict(module.named_parameters())
    for rule, each in saved.items():
        for name, kept in each.items() if isinstance(each, Mapping) else ():
            if isinstance(kept, Mapping):
                for parameter, tensor in kept.items():
                    if parameter not in shapes:
                        raise ValueError(f"weights.{rule}.{name} has {parameter!r}, which is no parameter")
                    _check_tensor(tensor, shapes[parameter], f"weights.{rule}.{name}.{parameter}")


def _check_tensor(saved: Any, own: Tensor, where: str) -> None:
    if not isinstance(saved, Tensor):
        _check(False, saved, own, where)
    if saved.shape != own.shape:
        raise ValueError(f"{where} is of shape {list(saved.shape)}, {list(own.shape)} is wanted")


def _check(good: bool, saved: Any, own: Any, where: str) -> None:
    if not good:
        raise ValueError(f"{where} is a {type(saved).__name__}, a {type(own).__name__} is wanted")
