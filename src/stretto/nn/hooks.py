"""Hooks of users: on parameters, and hooks that nothing calls once a model is cut.

Hooks on parameters, which a plain loop calls once a step, with the whole minibatch's gradient.

A stage's backward computes a part of it: of a micro-batch, or of one of the stages that share a parameter. A hook that
is linear, a mask or a factor, gives the same on the parts. What is no leaf of autograd's (a stash) gets the hooks, too.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.preserve import unique

T = TypeVar("T", bound=Tensor)


def hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """A gradient as the parameter's hooks leave it (Tensor.register_hook)."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def with_hooks_of(parameter: nn.Parameter, leaf: T) -> T:
    for hook in (parameter._backward_hooks or {}).values():
        leaf.register_hook(hook)  # type: ignore[no-untyped-call]
    return leaf


def refuse_hooks(
    title: str, module: nn.Module, *, tied: Iterable[nn.Parameter], per_update: int, replicas: int, stashed: bool
) -> None:
    """Raise UsageError for hooks that would be called otherwise than in a plain loop.

    `title` says whose parameters they are; `per_update` is the number of micro-batches of an update.
    """
    shared = {id(parameter) for parameter in tied}
    for name, parameter in module.named_parameters():
        parts = "several stages share it" if id(parameter) in shared else ""
        parts = "each replica has a part of the gradient" if replicas > 1 else parts
        parts = parts or ("an update has several micro-batches" if per_update > 1 else "")
        why = ""
        if parameter._backward_hooks and parts and (replicas > 1 or not is_linear(parameter)):
            why = parts
        elif parameter._post_accumulate_grad_hooks and (parts or stashed):
            why = parts or "its backward fills the gradient of another tensor"
        if why:
            raise UsageError(
                f"the parameter {name} of {title} has a hook, which a plain loop calls with the whole gradient, but "
                f"{why}: remove the hook, or let an optimizer of your own do what it does"
            )


@torch.no_grad()
def is_linear(parameter: nn.Parameter) -> bool:
    """Whether the hooks of a parameter give the same for parts of a gradient as for their sum, on two drawn ones."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale for scale in (1.0, 100.0)]
    one, other = (part.to(parameter.device, parameter.dtype) for part in parts)
    whole, parts_of_it = hooked(parameter, one + other), hooked(parameter, one) + hooked(parameter, other)
    largest = float(torch.maximum(whole.abs().max(), parts_of_it.abs().max()))
    return torch.allclose(parts_of_it, whole, rtol=1e-3, atol=1e-3 * largest)


KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
REMEDY = "hook a module inside one stage, or do in a module's forward what the hook does"


def hooks_of(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    return [getattr(module, kind) for kind in KINDS]


def refuse_lost_hooks(root: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Raise UsageError for hooks of modules that stages do not call, torch's own left out, which graphs record."""
    called = {id(module) for module in unique(stages)}
    lost = [
        f"{getattr(hook, '__qualname__', type(hook).__name__)} of {path or type(root).__name__}"
        for path, module in root.named_modules()
        if id(module) not in called
        for hooks in hooks_of(module)
        for hook in hooks.values()
        if not of_torch(hook)
    ]
    if lost:
        raise UsageError(
            f"{type(root).__name__} has hooks on modules that its stages do not call: {'; '.join(lost[:3])}"
            f"{' ...' * (len(lost) > 3)}. Remove them, {REMEDY}"
        )


def of_torch(thing: Any) -> bool:
    """Whether a function or class is torch's own."""
    return str(getattr(thing, "__module__", type(thing).__module__)).partition(".")[0] == "torch"
