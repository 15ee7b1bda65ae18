"""Take shapes and devices in an exported graph from nearby tensors, so that stages send fewer values."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

Sizes = dict[Any, tuple[fx.Node, int]]  # a symbol of torch.export: a tensor, and its dim of that size


def with_local_shapes(graph: fx.Graph, home: torch.device) -> fx.Graph:
    """Let each operation read sizes from its own tensors, else from the latest tensor before it of that size.

    torch.export reads all sizes from the batch, in the first nodes. It writes the model's device as a constant; here a
    tensor gives the device too, so that a stage runs on whatever device it is moved to.
    """
    latest: Sizes = {}
    newest: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and (node.op == "output" or not is_number(node)):
            tensors = [used for used in node.all_input_nodes if isinstance(used.meta.get("val"), Tensor)]
            sizes = {**latest, **{key: place for used in reversed(tensors) for key, place in sizes_of(used).items()}}
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
    """Replace the numbers and the device in one operation's arguments by nodes that read them from tensors."""
    new_nodes: dict[Any, fx.Node] = {}

    def recomputed(argument: fx.Node) -> fx.Node:
        if argument.op != "call_function" or not is_number(argument):
            return argument
        if argument not in new_nodes:
            symbol = symbol_of(argument.meta["val"])
            if symbol in sizes:
                new_nodes[argument] = graph.call_function(torch.ops.aten.sym_size.int, sizes[symbol])
            else:
                args, kwargs = map_arg((argument.args, argument.kwargs), recomputed)
                new_nodes[argument] = graph.create_node("call_function", argument.target, args, kwargs)
            new_nodes[argument].meta = dict(argument.meta)
        return new_nodes[argument]

    def with_device(value: Any) -> Any:
        if value == home and isinstance(value, torch.device) and source is not None:
            if home not in new_nodes:
                new_nodes[home] = graph.call_function(getattr, (source, "device"))
            return new_nodes[home]
        return value

    node.args, node.kwargs = map_aggregate(map_arg((node.args, node.kwargs), recomputed), with_device)


def is_number(node: fx.Node) -> bool:
    """Whether a node's value is a size or a number."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def sizes_of(node: fx.Node) -> Sizes:
    """The symbols among the sizes of a node's tensor, each with its dim."""
    sizes = {}
    for dim, size in reversed(list(enumerate(node.meta["val"].shape))):
        symbol = symbol_of(size)
        if symbol is not None:
            sizes[symbol] = node, dim
    return sizes


def symbol_of(size: Any) -> Any:
    """The symbol of a size; None for a number or an expression."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_Symbol else None
