"""Which of a forward's arguments the tensors of a batch fill."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stretto.errors import UsageError
from stretto.nn.batch import remedy_for_names

GATHERED = ("output_hidden_states", "output_attentions", "output_router_logits")  # in transformers' configurations


@dataclass(frozen=True)
class ForwardCall:
    """How the tensors of a batch, in order, become arguments of a forward; other arguments keep their defaults.

    `names` has one entry a tensor. The tensors are passed by keyword if `named`, else by position. `constants` are
    further keyword arguments.
    """

    names: tuple[str, ...]
    named: bool
    constants: Mapping[str, Any]

    @property
    def hint(self) -> str:
        """Which arguments the example fills, for messages; empty for a single tensor or named ones."""
        if self.named or len(self.names) < 2:
            return ""
        return f" (the example fills {', '.join(self.names)}; example={{name: tensor}} fills others)"

    def run(self, forward: Callable[..., Any], values: Sequence[Any]) -> Any:
        if self.named:
            return forward(**dict(zip(self.names, values, strict=True)), **self.constants)
        return forward(*values, **self.constants)


def find_call(model: nn.Module, num_given: int | None, names: Sequence[str] | None = None) -> ForwardCall:
    """How a batch of `num_given` tensors, or of tensors with `names`, is passed to the model.

    A forward that takes `use_cache` gets False: training needs no keys and values of earlier tokens. Raises UsageError
    if the batch does not fit the forward.
    """
    refuse_gathered(model)
    if names is not None:
        check_names(model, names)
        chosen = tuple(names)
    else:
        chosen = tuple(input_names(type(model).forward, count_inputs(model, num_given)))
    constants = {"use_cache": False} if "use_cache" not in chosen and caches(model) else {}
    return ForwardCall(chosen, names is not None, constants)


def refuse_gathered(model: nn.Module) -> None:
    """Raise UsageError for a Hugging Face model that returns what its blocks compute inside, by its configuration."""
    config = getattr(model, "config", None)
    for name in GATHERED:
        if getattr(config, name, False) is True:
            raise UsageError(
                f"{type(model).__name__} has {name}=True in its configuration: its forward gathers what its blocks "
                f"compute, and these are on several stages. Set model.config.{name} = False, and take what you need "
                "from the model when it is trained"
            )


def caches(model: nn.Module) -> bool:
    """Whether the forward takes `use_cache`: by name, or through **kwargs if the model's configuration has it."""
    parameters = inspect.signature(type(model).forward).parameters
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "use_cache" in parameters or (has_kwargs and hasattr(getattr(model, "config", None), "use_cache"))


def check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Raise UsageError for a name that is no argument of the forward, or an argument without a default not named."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in parameters if p.name in known and p.default is p.empty]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in names:
            if name not in known:
                remedy = remedy_for_names(names, known, required)
                raise UsageError(f"example names {name!r}, no argument of {title(model)}: {remedy}")
    missing = [name for name in required if name not in names]
    if missing:
        raise UsageError(f"example names {', '.join(names)}, but {title(model)} also needs {', '.join(missing)}")


def input_names(forward: Callable[..., Any], num_inputs: int) -> list[str]:
    """Names of the first `num_inputs` arguments of `forward`, an unbound method; members of *args are numbered."""
    positional, variable, _ = signature(forward)
    names = list(positional[:num_inputs])
    extra = num_inputs - len(names)
    assert not extra or variable, f"{num_inputs} inputs for {positional}"
    return names + [f"{variable}_{index}" for index in range(extra)]


def count_inputs(model: nn.Module, num_given: int | None) -> int:
    """How many arguments of the forward a batch fills: as many as the example has, else all without a default."""
    positional, variable, required = signature(type(model).forward)
    forward = title(model)
    if num_given is None:
        if not required:
            raise UsageError(
                f"every argument of {forward} has a default, so it is not known which of them a batch fills: give "
                "one input batch, example=x or example=(x, ...)"
            )
        return required
    if num_given < required or (num_given > len(positional) and not variable):
        takes = f"{required}" if required == len(positional) else f"{required} to {len(positional)}"
        raise UsageError(
            f"the example has {num_given} tensors, but {forward} takes {takes}{' or more' if variable else ''}: "
            "give example=x for one input, example=(x, ...) for several"
        )
    return num_given


def title(model: nn.Module) -> str:
    """The forward with its arguments, for messages: "GPT.forward(tokens, scale)"."""
    positional, variable, _ = signature(type(model).forward)
    return f"{type(model).__name__}.forward({', '.join(positional)}{', *' + variable if variable else ''})"


def signature(forward: Callable[..., Any]) -> tuple[list[str], str | None, int]:
    """Positional arguments after self, the name of *args if there is one, and how many have no default."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variable = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return [p.name for p in positional], variable, sum(p.default is p.empty for p in positional)
