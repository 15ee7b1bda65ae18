"""Hooks that nothing calls once a model is cut: those of modules that its stages do not call."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from stretto.errors import UsageError
from stretto.nn.preserve import unique

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
REMEDY = "hook a module inside one stage, or do in a module's forward what the hook does"


def hooks_of(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """The hooks of a module, by kind."""
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
