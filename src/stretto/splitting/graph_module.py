"""A graph as a module that torch.save writes and torch.load reads.

torch.fx's own is saved as code, which is traced again when it is read; what decides by a shape cannot be traced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
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
    """torch.fx's module of a graph, saved with the graph's nodes instead of its code; called as any module is."""

    def recompile(self) -> Any:
        """As torch.fx's, whose own call prints a traceback on stderr where an input does not fit, beside the error."""
        code = super().recompile()
        del type(self).__call__  # each instance has a class of its own
        return code

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
    namespace, _, name = saved_name.name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), saved_name.overload or "default")


def assemble(
    graph: fx.Graph, targets: Mapping[str, Any], persistent: set[str], model: nn.Module, name: str
) -> GraphModule:
    """A GraphModule that runs `graph` on the model's own modules, parameters and buffers, under their own names.

    `targets` maps each dotted name in the graph to its object; `persistent` are the names in the model's state_dict.
    """
    used_targets = sorted({str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")})
    holder = nn.Module()
    for target in sorted(used_targets, key=lambda target: target.count(".")):
        install(holder, target, targets[target])
    holder.training = model.training
    module = GraphModule(holder, graph, class_name=name)
    in_model = {
        id(submodule) for value in targets.values() if isinstance(value, nn.Module) for submodule in value.modules()
    }
    for submodule in module.modules():
        if id(submodule) not in in_model:
            submodule.training = model.training
    for target in used_targets:
        value, (owner, _, field) = targets[target], target.rpartition(".")
        container = module.get_submodule(owner)
        plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        # fx registers every buffer as persistent.
        if plain and target not in persistent and id(container) not in in_model:
            container.register_buffer(field, value, persistent=False)
    return module


def install(holder: nn.Module, target: str, value: Any) -> None:
    """Set `value` at the dotted name `target` of `holder`, unless a module installed before already has it."""
    *prefix, field = target.split(".")
    for child in prefix:
        if not hasattr(holder, child):
            holder.add_module(child, nn.Module())
        holder = getattr(holder, child)
    if not hasattr(holder, field):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            holder.register_buffer(field, value)
        else:
            setattr(holder, field, value)
