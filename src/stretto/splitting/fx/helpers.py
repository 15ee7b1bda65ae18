"""Functions that a forward calls, as one node each: like modules that hold no block, they are not looked into."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

HELPER = "helper"  # in the meta of a helper function's node


@contextmanager
def recorded_helpers(tracer: fx.Tracer, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Calls of the functions that the source files of the modules around the blocks know become nodes."""
    held = {id(block) for block in blocks.values()}
    around = [model, *(module for module in model.modules() if id(module) not in held and holds(module, held))]
    files = sorted({type(module).__module__ for module in around})
    namespaces = [vars(sys.modules[name]) for name in files if name in sys.modules]
    former = [(space, name, value) for space in namespaces for name, value in space.items() if is_helper(value)]
    for space, name, value in former:
        space[name] = recorder(tracer, value, held)
    try:
        yield
    finally:
        for space, name, value in former:
            space[name] = value


def holds(module: nn.Module, blocks: set[int]) -> bool:
    """Whether a module has a block in it, or in a plain list."""
    return any(id(inner) in blocks for inner in module.modules())


def is_helper(value: object) -> bool:
    """Whether a global is a plain function that returns something of its own."""
    return (
        isinstance(value, FunctionType)
        and value.__name__.isidentifier()
        and not inspect.isgeneratorfunction(inspect.unwrap(value))
        and not inspect.iscoroutinefunction(value)
    )


def recorder(tracer: fx.Tracer, function: Callable[..., Any], blocks: set[int]) -> Callable[..., Any]:
    """`function`, recorded where it is given a traced value and nothing that could call a block."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(members((args, kwargs)))
        if any(isinstance(value, fx.Proxy) for value in given) and not any(runs(value, blocks) for value in given):
            made = tracer.create_proxy("call_function", function, args, kwargs)
            made.node.meta[HELPER] = True
            return made
        return function(*args, **kwargs)

    return call


def members(value: Any) -> Iterator[Any]:
    """The values in tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for member in value:
            yield from members(member)
    elif isinstance(value, dict):
        yield from members(list(value.values()))
    else:
        yield value


def runs(value: object, blocks: set[int]) -> bool:
    """Whether a function could call a block through this argument."""
    if isinstance(value, nn.Module):
        return holds(value, blocks)
    return callable(value) and not isinstance(value, (type, fx.Proxy, Tensor, torch.dtype))
