"""A graph as a module that holds the model's own modules, parameters and buffers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from stretto.splitting.graph_module import GraphModule


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
