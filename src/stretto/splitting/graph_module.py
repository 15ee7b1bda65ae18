"""A graph as a module that torch.save writes and torch.load reads.

torch.fx's own is saved as code, which is traced again when it is read; what decides by a shape cannot be traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

OF_FX = vars(fx.GraphModule(nn.Module(), fx.Graph())).keys() - vars(nn.Module()).keys()


@dataclass(frozen=True)
class Used:
    """A node that another one uses, by its place in the graph."""

    place: int


@dataclass(frozen=True)
class Operator:
    """An operator of torch.ops by name: it cannot be pickled."""

    name: str
    overload: str


class GraphModule(fx.GraphModule):
    """torch.fx's module of a graph, saved with the graph's nodes instead of its code."""

    def __reduce__(self) -> Any:
        """The nodes, and what any module has."""
        state = {name: value for name, value in vars(self).items() if name not in OF_FX}
        return read, (type(self).__name__, saved(self.graph), state)


def saved(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The nodes of a graph, as `read` takes them."""
    places = {node: place for place, node in enumerate(graph.nodes)}

    def portable(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Used(places[value])
        return Operator(value._schema.name, value._overloadname) if isinstance(value, OpOverload) else value

    return [
        (node.op, portable(node.target), *map_aggregate((node.args, node.kwargs), portable), node.name)
        for node in graph.nodes
    ]


def read(name: str, nodes: Sequence[tuple[Any, ...]], state: dict[str, Any]) -> GraphModule:
    """The module that was saved."""
    graph, made = fx.Graph(), list[fx.Node]()

    def found(value: Any) -> Any:
        if isinstance(value, Used):
            return made[value.place]
        return operator(value) if isinstance(value, Operator) else value

    for op, target, args, kwargs, node_name in nodes:
        given, named = map_aggregate((args, kwargs), found)
        made.append(graph.create_node(op, found(target), given, named, name=node_name))
    holder = nn.Module()
    vars(holder).update(state)
    module = GraphModule(holder, graph, class_name=name)
    vars(module).update(state)
    return module


def operator(saved_name: Operator) -> Any:
    """The operator of torch.ops."""
    namespace, _, name = saved_name.name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), saved_name.overload or "default")
