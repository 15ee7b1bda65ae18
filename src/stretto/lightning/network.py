"""The module whose forward is the pipeline: how its arguments become a batch, and what its stages return its output."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.errors import UsageError
from stretto.lightning.batch_parts import members
from stretto.nn.batch import call, inputs_of, with_names_of
from stretto.nn.chain import Chain
from stretto.nn.preserve import device_of, undisturbed
from stretto.options.checks import shown
from stretto.splitting import Stages

Arguments = dict[str, Tensor]  # of a forward, by name
PROBED = 2  # examples that are run through the whole model once, to see what its forward returns


@dataclass(frozen=True, eq=False)
class Network:
    """A module cut into stages.

    `arguments` names the forward's arguments with tensors, `fills` the arguments of the cut module that take them,
    None: by position. `prefix` leads to that module in the LightningModule's names. `form` is the output's form where
    it is no tensor or tuple of tensors: its class and keys.
    """

    stages: Stages
    arguments: Sequence[str]
    fills: Sequence[str] | None
    prefix: str
    form: tuple[type, Sequence[str]] | None

    def batch(self, arguments: Arguments) -> Any:
        """The batch as stage 0 takes it."""
        if arguments.keys() != {*self.arguments}:
            raise UsageError(
                f"self(...) was first called with the tensors {', '.join(self.arguments)}, and now with "
                f"{', '.join(arguments)}: give it the same arguments in every step"
            )
        values = [arguments[name] for name in self.arguments]
        return tuple(values) if self.fills is None else dict(zip(self.fills, values, strict=True))

    def output(self, output: Any) -> Any:
        """What self(...) returns, from the last stage's output."""
        if self.form is None:
            return output
        kind, keys = self.form
        return kind(**dict(zip(keys, output if isinstance(output, tuple) else (output,), strict=True)))


def bind(forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments of a call of forward that are tensors, by name.

    Raises UsageError for other values, unless they are None: between stages only tensors travel.
    """
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"self(...): {error}") from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}[{index}]": each for index, each in enumerate(value)}
        else:
            named[name] = value
    for name, value in named.items():
        if value is not None and not isinstance(value, Tensor):
            whole = ": write self(**batch), and name the keys as arguments of forward" * isinstance(value, Mapping)
            raise UsageError(
                f"self({name}={shown(value)}): only tensors travel between stages{whole or '. Give forward a default'}"
            )
    return {name: value for name, value in named.items() if value is not None}


def cut_network(
    target: nn.Module, prefix: str, arguments: Arguments, stages: int | Sequence[int], options: Mapping[str, Any]
) -> Network:
    """Cut `target`, or the module inside it that its forward hands all to; `prefix` is its name and a dot, or ""."""
    probe = {name: tensor[:PROBED] if tensor.dim() else tensor for name, tensor in arguments.items()}
    names, model = list(arguments), target
    result, calls = run(target, probe)
    inner = next((each for each in calls if each.hands_on(probe, result)), None)
    if inner is not None:
        prefix, model = f"{prefix}{inner.name}.", inner.module
        arguments = {name: arguments[name] for name in inner.order(probe)}
        names = inner.names
    fills = None if names == leading_names(model, len(names)) else names
    values = arguments.values()
    example: Any = tuple(values) if fills is None else dict(zip(fills, values, strict=True))
    cut = stretto.split(model, stages, example=example, **options)
    return Network(cut, list(arguments), fills, prefix, form_of(target, cut, example, result))


def leading_names(module: nn.Module, count: int) -> list[str]:
    """The names of the first arguments of a forward, which a tuple of tensors fills; those of *args are numbered."""
    names: list[str] = []
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[1:]:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{index}]" for index in range(count - len(names))]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names[:count]


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a module within a forward."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def hands_on(self, given: Arguments, result: Any) -> bool:
        """Whether the forward does nothing but this call: it passes on its own arguments, and returns the output."""
        passed = self.passed.values()
        theirs = {id(tensor) for tensor in given.values()}
        if len(passed) != len(theirs) or {*map(id, passed)} != theirs:
            return False
        tensors = [each for each in members(self.output) if isinstance(each, Tensor)]
        return result is self.output or (len(tensors) == 1 and result is tensors[0])

    def order(self, given: Arguments) -> list[str]:
        """The names of the outer forward's arguments, in the order of this call's."""
        names = {id(tensor): name for name, tensor in given.items()}
        return [names[id(tensor)] for tensor in self.passed.values()]

    @property
    def passed(self) -> dict[str, Any]:
        """The arguments by name, without those that are None."""
        named = dict(zip(leading_names(self.module, len(self.args)), self.args, strict=False)) | self.kwargs
        return {name: value for name, value in named.items() if value is not None}

    @property
    def names(self) -> list[str]:
        return list(self.passed)


@torch.no_grad()
def run(target: nn.Module, arguments: Arguments) -> tuple[Any, list[Call]]:
    """The output of a forward in evaluation mode, and the calls of modules in it, outer ones first."""
    calls: list[Call] = []
    names = {id(module): name for name, module in target.named_modules()}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(names[id(module)], module, args, kwargs, output))

    handles = [
        module.register_forward_hook(note, with_kwargs=True) for module in target.modules() if module is not target
    ]
    try:
        with undisturbed([target], device_of([target])):
            positional = all(
                parameter.kind is not inspect.Parameter.VAR_POSITIONAL
                for parameter in inspect.signature(target.forward).parameters.values()
            )
            result = target(**arguments) if positional else target(*arguments.values())
    finally:
        for handle in handles:
            handle.remove()
    return result, calls[::-1]  # an outer call ends after those within it


@torch.no_grad()
def form_of(target: nn.Module, stages: Sequence[nn.Module], example: Any, result: Any) -> tuple[type, list[str]] | None:
    """The class and keys of a forward's output; None for a tensor, or a tuple of tensors.

    Raises UsageError if the stages return something else than the forward.
    """
    keys = [key for key, value in result.items() if isinstance(value, Tensor)] if isinstance(result, Mapping) else []
    expected = [result[key] for key in keys] or ([result] if isinstance(result, Tensor) else members(result))
    with undisturbed([target, *stages], device_of([target])):
        inputs = inputs_of(example)
        short = [tensor[:PROBED] if tensor.dim() else tensor for tensor in inputs]
        output = call(Chain(*stages), with_names_of(inputs, short))
    got = output if isinstance(output, tuple) else (output,)
    alike = len(got) == len(expected) and all(
        isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
        for one, other in zip(got, expected, strict=True)
    )
    if not alike:
        raise UsageError(
            f"forward of {type(target).__name__} returns {shown(result)}, and its stages {shown(output)}: return a "
            "tensor, or a tuple or dict of tensors"
        )
    return (type(result), keys) if keys else None
