"""Shapes and devices in an exported graph, asked of tensors that are at hand: less has to travel between stages."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

Sizes = dict[Any, tuple[fx.Node, int]]  # a symbol of torch.export's, and a tensor and its dim that have that size


def with_local_shapes(graph: fx.Graph, home: torch.device) -> fx.Graph:
    """Let each operation take sizes from its own tensors where they have them, else from the latest that has.

    torch.export asks the batch for its sizes, at the beginning. It writes the model's device as a constant; here it is
    asked of a tensor too, so that a stage runs where it is put.
    """
    latest: Sizes = {}
    newest: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and (node.op == "output" or not is_number(node)):
            tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
            sizes = {**latest, **{key: at for each in reversed(tensors) for key, at in sizes_of(each).items()}}
            source = next(iter(tensors), newest)
            with graph.inserting_before(node):
                adapt(graph, node, sizes, source, home)
        if isinstance(node.meta.get("val"), Tensor) and node.op != "get_attr":
            newest = node
            latest.update(sizes_of(node))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and is_number(node) and not node.users:
            graph.erase_node(node)
    return graph


def adapt(graph: fx.Graph, node: fx.Node, sizes: Sizes, source: fx.Node | None, home: torch.device) -> None:
    """Give one operation its numbers and its device anew."""
    made: dict[Any, fx.Node] = {}

    def remade(used: fx.Node) -> fx.Node:
        if used.op != "call_function" or not is_number(used):
            return used
        if used not in made:
            symbol = symbol_of(used.meta["val"])
            if symbol in sizes:
                made[used] = graph.call_function(torch.ops.aten.sym_size.int, sizes[symbol])
            else:
                args, kwargs = map_arg((used.args, used.kwargs), remade)
                made[used] = graph.create_node("call_function", used.target, args, kwargs)
            made[used].meta = dict(used.meta)
        return made[used]

    def placed(value: Any) -> Any:
        if value == home and isinstance(value, torch.device) and source is not None:
            if home not in made:
                made[home] = graph.call_function(getattr, (source, "device"))
            return made[home]
        return value

    node.args, node.kwargs = map_aggregate(map_arg((node.args, node.kwargs), remade), placed)


def is_number(node: fx.Node) -> bool:
    """Whether an operation gives a size or a number."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def sizes_of(node: fx.Node) -> Sizes:
    """The symbols that are sizes of a tensor."""
    found = {}
    for dim, size in reversed(list(enumerate(node.meta["val"].shape))):
        symbol = symbol_of(size)
        if symbol is not None:
            found[symbol] = node, dim
    return found


def symbol_of(size: Any) -> Any:
    """The symbol that a size is, None if it is a number or is computed."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else None
