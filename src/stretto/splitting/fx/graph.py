"""Record a model's forward as a graph, by torch.fx."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from stretto.errors import UsageError
from stretto.nn.preserve import evaluating, unchanged
from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import ForwardCall
from stretto.splitting.fx.tracer import OURS, BlockTracer, recorded_factories

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


REMEDY = (
    "What the model does between its blocks must be the same for every input; put anything else into a module of its "
    "own (modules that hold no block are not looked into), or give split an nn.Sequential or a list of layers"
)


class TraceError(UsageError):
    """The forward cannot be traced and cut between blocks; another way to cut the model may work."""


class RecordedForward(NamedTuple):
    """A graph; the model's module, parameter, buffer or constant for each target in it; the names of the outputs."""

    graph: fx.Graph
    targets: dict[str, Any]
    outputs: tuple[str, ...]


def record(
    model: nn.Module, blocks: Mapping[str, nn.Module], call: ForwardCall, inputs: Inputs | None
) -> RecordedForward:
    """Trace `model.forward` as `call` says, for the example `inputs` if there is one.

    The model is traced in training and in evaluation, to detect a forward that decides by `self.training`: a trace
    would freeze that decision. Raises TraceError, with the line, if the forward cannot be traced.
    """
    records = []
    random_state = torch.get_rng_state()
    with evaluating([model]), torch.random.fork_rng([]):
        for training in (True, False):
            model.train(training)
            records.append(trace_once(model, blocks, call, inputs))
        if not torch.equal(random_state, torch.get_rng_state()):
            raise TraceError(
                f"{type(model).__name__}.forward draws random numbers of a fixed shape between its blocks: traced, "
                "they would be the same at every step. Draw them in a module of its own, or with torch.rand_like(x)"
            )
    for trained, evaluated in zip(records[0].graph.nodes, records[1].graph.nodes, strict=False):
        if trained.format_node() != evaluated.format_node():
            raise TraceError(
                f"{type(model).__name__}.forward reads self.training between its blocks (at {trained.format_node()!r})"
                ": traced, it would be frozen. Use nn.Dropout, or a module of its own, in place of a function"
            )
    return records[1]


def trace_once(
    model: nn.Module, blocks: Mapping[str, nn.Module], call: ForwardCall, inputs: Inputs | None
) -> RecordedForward:
    """Trace the forward once and restore the model: fx sets constants on it, and its forward may set attributes."""
    tracer = BlockTracer(blocks, call, inputs)
    try:
        with unchanged(model):
            with recorded_factories(tracer), recorded_helpers(tracer, model, blocks):
                graph = tracer.trace(model)
            targets = {
                node.target: resolve(model, blocks, node.target)
                for node in graph.nodes
                if node.op in ("get_attr", "call_module")
            }
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__}.forward cannot be traced{place(error)}: {type(error).__name__}: "
            f"{error}{call.hint}. {REMEDY}"
        ) from error
    return RecordedForward(graph, targets, tracer.outputs)


def resolve(model: nn.Module, blocks: Mapping[str, nn.Module], target: str) -> Any:
    """The object at a dotted path of the model; blocks in plain lists by their own names."""
    if target in blocks:
        return blocks[target]
    value: Any = model
    for attribute in target.split("."):
        value = getattr(value, attribute)
    return value


def place(error: BaseException) -> str:
    """The last line of user code in an error's traceback, for messages; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(OURS):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
