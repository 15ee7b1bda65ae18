"""Record a model's forward as a graph, by torch.fx."""

import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from stretto.errors import UsageError
from stretto.nn.preserve import evaluating, unchanged
from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import ForwardCall
from stretto.splitting.fx.decisions import OURS
from stretto.splitting.fx.helpers import recorded_helpers
from stretto.splitting.fx.tracer import BlockTracer, recorded_factories

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
