"""Which arguments of a forward a batch fills."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from stretto.errors import UsageError


def input_names(forward: Callable[..., Any], num_inputs: int) -> list[str]:
    """Names for the arguments of `forward` (an unbound method) that a batch fills."""
    positional, variable, _ = signature(forward)
    names = list(positional[:num_inputs])
    extra = num_inputs - len(names)
    assert not extra or variable, f"{num_inputs} inputs for {positional}"
    return names + [f"{variable}_{index}" for index in range(extra)]


def count_inputs(model: nn.Module, num_given: int | None) -> int:
    """How many arguments of forward a batch fills: those the example gives, or those without a default."""
    forward = type(model).forward
    positional, variable, required = signature(forward)
    kind = type(model).__name__
    wants = f"{kind}.forward({', '.join(positional)}{', *' + variable if variable else ''})"
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


def signature(forward: Callable[..., Any]) -> tuple[list[str], str | None, int]:
    """Positional arguments after self, the name of *args if there is one, and how many have no default."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variable = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return [p.name for p in positional], variable, sum(p.default is p.empty for p in positional)
