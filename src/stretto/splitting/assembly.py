"""Graphs as modules that hold the model's own parts."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn


def assemble(
    graph: fx.Graph, targets: Mapping[str, Any], persistent: set[str], model: nn.Module, name: str
) -> fx.GraphModule:
    """A module that runs the graph on the very objects its targets name, in the containers their names ask for."""
    wanted = sorted({str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")})
    holder = nn.Module()
    for target in sorted(wanted, key=lambda target: target.count(".")):
        install(holder, target, targets[target])
    holder.training = model.training
    module = fx.GraphModule(holder, graph, class_name=name)
    owned = {id(inner) for value in targets.values() if isinstance(value, nn.Module) for inner in value.modules()}
    for inner in module.modules():
        if id(inner) not in owned:
            inner.training = model.training
    for target in wanted:
        value, (owner, _, field) = targets[target], target.rpartition(".")
        container = module.get_submodule(owner)
        plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if plain and target not in persistent and id(container) not in owned:  # fx registers them all as persistent
            container.register_buffer(field, value, persistent=False)
    return module


def install(holder: nn.Module, target: str, value: Any) -> None:
    """Put a module, parameter, tensor or other object where its dotted name says, unless its owner is there already."""
    *prefix, field = target.split(".")
    for item in prefix:
        if not hasattr(holder, item):
            holder.add_module(item, nn.Module())
        holder = getattr(holder, item)
    if not hasattr(holder, field):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            holder.register_buffer(field, value)
        else:
            setattr(holder, field, value)
