"""Which arguments of a forward a batch fills."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stretto.errors import UsageError, nearest


@dataclass(frozen=True)
class ForwardCall:
    """How the tensors of a batch, in order, become arguments of a forward; the others keep their defaults.

    `names` has one entry a tensor; they are handed over under these names where `named`, else by position.
    """

    names: tuple[str, ...]
    named: bool
    constants: Mapping[str, Any]

    @property
    def hint(self) -> str:
        """What may have been meant otherwise, for messages; nothing if a single tensor was given."""
        if self.named or len(self.names) < 2:
            return ""
        return f" (the example fills {', '.join(self.names)}; example={{name: tensor}} fills others)"

    def run(self, forward: Callable[..., Any], values: Sequence[Any]) -> Any:
        """What `forward` gives for these values."""
        if self.named:
            return forward(**dict(zip(self.names, values, strict=True)), **self.constants)
        return forward(*values, **self.constants)


def find_call(model: nn.Module, num_given: int | None, names: Sequence[str] | None = None) -> ForwardCall:
    """How a batch of so many tensors, with names or without, is handed to the model.

    Where a forward can be told to `use_cache`, it is told not to: what a decoder remembers for the next token is no
    part of training. Raises UsageError if the batch does not fit the forward.
    """
    if names is not None:
        check_names(model, names)
        chosen = tuple(names)
    else:
        chosen = tuple(input_names(type(model).forward, count_inputs(model, num_given)))
    constants = {"use_cache": False} if "use_cache" not in chosen and caches(model) else {}
    return ForwardCall(chosen, names is not None, constants)


def caches(model: nn.Module) -> bool:
    """Whether the forward takes `use_cache`, by that name or among others that its configuration knows."""
    parameters = inspect.signature(type(model).forward).parameters
    others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "use_cache" in parameters or (others and hasattr(getattr(model, "config", None), "use_cache"))


def check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse names that the forward does not know, and arguments without a default that no name fills."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in names:
            if name not in known:
                raise UsageError(f"example names {name!r}, no argument of {title(model)}: {nearest(name, known)}")
    missing = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in names]
    if missing:
        raise UsageError(f"example names {', '.join(names)}, but {title(model)} also needs {', '.join(missing)}")


def input_names(forward: Callable[..., Any], num_inputs: int) -> list[str]:
    """Names for the arguments of `forward` (an unbound method) that a batch fills."""
    positional, variable, _ = signature(forward)
    names = list(positional[:num_inputs])
    extra = num_inputs - len(names)
    assert not extra or variable, f"{num_inputs} inputs for {positional}"
    return names + [f"{variable}_{index}" for index in range(extra)]


def count_inputs(model: nn.Module, num_given: int | None) -> int:
    """How many arguments of forward a batch fills: those the example gives, or those without a default."""
    positional, variable, required = signature(type(model).forward)
    wants = title(model)
    if num_given is None:
        if not required:
            raise UsageError(
                f"every argument of {wants} has a default, so it is not known which of them a batch fills: give one "
                "input batch, example=x or example=(x, ...)"
            )
        return required
    if num_given < required or (num_given > len(positional) and not variable):
        takes = f"{required}" if required == len(positional) else f"{required} to {len(positional)}"
        raise UsageError(
            f"the example has {num_given} tensors, but {wants} takes {takes}{' or more' if variable else ''}: "
            "give example=x for one input, example=(x, ...) for several"
        )
    return num_given


def title(model: nn.Module) -> str:
    """The forward and its arguments, for messages."""
    positional, variable, _ = signature(type(model).forward)
    return f"{type(model).__name__}.forward({', '.join(positional)}{', *' + variable if variable else ''})"


def signature(forward: Callable[..., Any]) -> tuple[list[str], str | None, int]:
    """Positional arguments after self, the name of *args if there is one, and how many have no default."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variable = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return [p.name for p in positional], variable, sum(p.default is p.empty for p in positional)
