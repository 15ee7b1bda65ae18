"""A model's forward as a graph."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from stretto.errors import UsageError
from stretto.evaluate import evaluating
from stretto.splitting.tracer import BlockTracer, recorded_factories

REMEDY = (
    "What the model does between its blocks must be the same for every input; put anything else into a module of its "
    "own (modules that hold no block are not looked into), or give split an nn.Sequential or a list of layers"
)


def record(model: nn.Module, blocks: Mapping[str, nn.Module], num_inputs: int) -> tuple[fx.Graph, dict[str, Any]]:
    """Trace `model.forward` with its first `num_inputs` arguments given and the others at their defaults.

    Returns the graph and, for each target in it, the model's own module, parameter, buffer or constant. The model is
    traced in training and in evaluation: a forward that decides by `self.training` would be frozen as it was traced.
    Raises UsageError, naming the line, where the forward cannot be traced.
    """
    graphs = []
    targets: dict[str, Any] = {}
    generator = torch.get_rng_state()
    with evaluating([model]), torch.random.fork_rng([]):
        for training in (True, False):
            model.train(training)
            graph, targets = trace_once(model, blocks, num_inputs)
            graphs.append(graph)
        if not torch.equal(generator, torch.get_rng_state()):
            raise UsageError(
                f"{type(model).__name__}.forward draws random numbers of a fixed shape between its blocks: traced, "
                "they would be the same at every step. Draw them in a module of its own, or with torch.rand_like(x)"
            )
    for trained, evaluated in zip(graphs[0].nodes, graphs[1].nodes, strict=False):
        if trained.format_node() != evaluated.format_node():
            raise UsageError(
                f"{type(model).__name__}.forward reads self.training between its blocks (at {trained.format_node()!r})"
                ": traced, it would be frozen. Use nn.Dropout, or a module of its own, in place of a function"
            )
    return graphs[1], targets


def trace_once(model: nn.Module, blocks: Mapping[str, nn.Module], num_inputs: int) -> tuple[fx.Graph, dict[str, Any]]:
    """One trace. The model is left as it was: fx hangs constants on it, and its forward may keep what it was given."""
    tracer = BlockTracer(blocks, num_inputs)
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        with recorded_factories(tracer):
            graph = tracer.trace(model)
        targets = {
            node.target: resolve(model, blocks, node.target)
            for node in graph.nodes
            if node.op in ("get_attr", "call_module")
        }
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__}.forward cannot be traced{place(error)}: {type(error).__name__}: {error}. {REMEDY}"
        ) from error
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
    return graph, targets


def resolve(model: nn.Module, blocks: Mapping[str, nn.Module], target: str) -> Any:
    """What a dotted name stands for."""
    if target in blocks:
        return blocks[target]
    value: Any = model
    for item in target.split("."):
        value = getattr(value, item)
    return value


def place(error: BaseException) -> str:
    """The last line of the user's on the way to an error."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""
