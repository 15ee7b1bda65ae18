"""Optimizers that look at all their parameters together: a stage's own would see those of the stage alone.

A norm of all gradients (clipping in the optimizer, or in a hook on its step) and one step size for all, estimated from
them (Prodigy, D-Adaptation), are other numbers in a stage than in the whole network.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.options.object_digest import names_in

STEPS, SIZE = 5, 3
NORMAL = {"normal", "normal_", "log_normal_"}  # random numbers, not norms
APART = (
    "but each stage has an optimizer of its own. Clip with clip=, use an optimizer that treats each parameter by "
    "itself, or one stage"
)


def refuse_coupled(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer of which the step of one parameter depends on another one's gradient."""
    kind = type(optimizer).__name__
    if any(map(takes_norm, getattr(optimizer, "_optimizer_step_pre_hooks", {}).values())):
        raise UsageError(f"{kind} has a hook before its step that takes a norm, {APART}")
    if type(optimizer).__module__.startswith(("torch.optim.", "stretto.optim.")) or only_wraps(type(optimizer)):
        return
    parameters = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
    if len(parameters) < 2:
        return
    try:
        together, alone = stepped(optimizer, parameters, False), stepped(optimizer, parameters, True)
    except Exception:  # noqa: BLE001 (one that takes no smaller tensors, or no copy, is not judged)
        return
    if not torch.equal(together, alone):
        raise UsageError(f"{kind} lets the step of a parameter depend on the gradients of others, {APART}")


def only_wraps(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the class's step is that of the class it is derived from, with something around it that takes no norm."""
    code = getattr(inspect.unwrap(kind.step), "__code__", None)
    return code is not None and "super" in names_in(code) and not takes_norm(kind.step)


def takes_norm(function: Any) -> bool:
    """Whether a function's code mentions a norm, such as clip_grad_norm_; False of what has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any("norm" in name for name in names_in(code) - NORMAL)


def stepped(optimizer: torch.optim.Optimizer, parameters: list[Tensor], alone: bool) -> Tensor:
    """A part of the first of the parameters after some steps of a copy; `alone`: the others have no gradient."""
    small = {id(p): nn.Parameter(torch.full(part_of(p), 0.5, dtype=p.dtype)) for p in parameters}
    memo: dict[int, Any] = {**small}
    tried = copy.deepcopy(optimizer, memo)
    # torch copies the attributes of its own optimizers alone; a scheduler's `step` would step the original
    for name in vars(optimizer).keys() - vars(tried).keys() - {"step"}:
        setattr(tried, name, copy.deepcopy(vars(optimizer)[name], memo))
    first = small[id(parameters[0])]
    for step in range(STEPS):
        draws = torch.Generator().manual_seed(0)  # the same gradient again: estimates of a step size grow
        for p in small.values():
            gradient = torch.randn(p.shape, generator=draws, dtype=torch.float64).to(p.dtype)
            p.grad = None if alone and p is not first else gradient
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step)
            tried.step()
    return first.detach()


def part_of(parameter: Tensor) -> list[int]:
    """The shape of a corner of a parameter."""
    return [min(SIZE, size) for size in parameter.shape]
