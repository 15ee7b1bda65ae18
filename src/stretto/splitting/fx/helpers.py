"""Record each helper function that a forward calls as one node, as modules without blocks are recorded."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

HELPER = "helper"  # a key in the meta of a helper function's node


@contextmanager
def recorded_helpers(tracer: fx.Tracer, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Record calls of plain functions in the namespaces of the modules around the blocks as nodes."""
    block_ids = {id(block) for block in blocks.values()}
    around = [
        model,
        *(module for module in model.modules() if id(module) not in block_ids and holds(module, block_ids)),
    ]
    module_names = sorted({type(module).__module__ for module in around})
    namespaces = [vars(sys.modules[name]) for name in module_names if name in sys.modules]
    originals = [
        (namespace, name, value) for namespace in namespaces for name, value in namespace.items() if is_helper(value)
    ]
    for namespace, name, value in originals:
        namespace[name] = recorder(tracer, value, block_ids)
    try:
        yield
    finally:
        for namespace, name, value in originals:
            namespace[name] = value


def holds(module: nn.Module, blocks: set[int]) -> bool:
    """Whether a module is a block or contains one; `blocks` are ids."""
    return any(id(inner) in blocks for inner in module.modules())


def is_helper(value: object) -> bool:
    """Whether a global is a plain function: no lambda, generator or coroutine."""
    return (
        isinstance(value, FunctionType)
        and value.__name__.isidentifier()
        and not inspect.isgeneratorfunction(inspect.unwrap(value))
        and not inspect.iscoroutinefunction(value)
    )


def recorder(tracer: fx.Tracer, function: Callable[..., Any], blocks: set[int]) -> Callable[..., Any]:
    """`function`, recorded as a node if an argument is traced and none could call a block."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = list(members((args, kwargs)))
        if any(isinstance(value, fx.Proxy) for value in arguments) and not any(
            can_call_block(value, blocks) for value in arguments
        ):
            proxy = tracer.create_proxy("call_function", function, args, kwargs)
            proxy.node.meta[HELPER] = True
            return proxy
        return function(*args, **kwargs)

    return call


def members(value: Any) -> Iterator[Any]:
    """The values in nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for member in value:
            yield from members(member)
    elif isinstance(value, dict):
        yield from members(list(value.values()))
    else:
        yield value


def can_call_block(value: object, blocks: set[int]) -> bool:
    """Whether a function that is given this argument could call a block through it."""
    if isinstance(value, nn.Module):
        return holds(value, blocks)
    return callable(value) and not isinstance(value, (type, fx.Proxy, Tensor, torch.dtype))
