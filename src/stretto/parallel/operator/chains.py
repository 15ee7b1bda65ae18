"""Which layers belong together: a column layer whose output meets nothing but rows.

Read off the graph that torch.fx traces, so that it holds for Sequential, residual blocks and a user's own forward: from
a layer on, what its cut output passes through must work on each channel alone, up to layers that take it as their
input. Whatever cannot be traced, or meets something else, is left alone.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.role import CONVOLUTIONS, Role, groups, is_transposed, kind, width

POINTWISE = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardtanh, nn.ReLU6,
    nn.Mish, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Identity,
)  # fmt: skip
RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
PER_CHANNEL = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Upsample, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
)  # fmt: skip
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
FUNCTIONS = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.iadd,
    operator.imul, torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.relu, torch.tanh, torch.sigmoid,
    torch.erf, torch.exp, torch.clamp, torch.square, torch.sqrt, F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.elu,
    F.selu, F.leaky_relu, F.hardtanh, F.relu6, F.mish, F.softplus, F.hardswish, F.hardsigmoid, F.logsigmoid,
}  # fmt: skip
METHODS = {"add", "sub", "mul", "div", "pow", "relu", "relu_", "tanh", "sigmoid", "erf", "exp", "clamp", "square"}
POOLS = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How an activation is cut: channels on each process, and whether they are features at the end or channels before
    spatial dims; `flat`: a flattened image, whose features are those of its channels, in order.
    """

    sizes: tuple[int, ...]
    spatial: bool
    flat: bool = False


class Tracer(fx.Tracer):
    """Sees torch's own layers and those that can be cut as one node each."""

    proxy_buffer_attributes = True  # tracing changes no buffer

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether not to look inside."""
        return is_transposed(m) or super().is_leaf_module(m, module_qualified_name)


def graphs(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, fx.Graph]]:
    """The largest parts of a module that can be traced, with their paths."""
    if not any(True for _ in module.children()):
        return
    graph = traced(module)
    if graph is not None:
        yield path, module, graph
        return
    for name, child in module.named_children():
        yield from graphs(child, f"{path}.{name}" if path else name)


def traced(module: nn.Module) -> fx.Graph | None:
    """Run a module's forward on symbols; None where that fails, in whatever way: such a module is left as it is."""
    before = {part: dict(part.__dict__) for part in module.modules()}
    try:
        return Tracer().trace(module)
    except Exception:  # noqa: BLE001
        return None
    finally:
        for part, attributes in before.items():
            part.__dict__.clear()
            part.__dict__.update(attributes)


def chains(root: nn.Module, axis: Axis, taken: set[str]) -> dict[str, Role]:
    """The roles of layers that belong together, by path; those in `taken` have one already."""
    roles: dict[str, Role] = {}
    for path, module, graph in graphs(root):
        calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        called = {f"{path}.{target}" if path else target: calls.count(target) for target in calls}
        free = {each for each, count in called.items() if count == 1} - taken
        for node in graph.nodes:
            if node.op == "call_module":
                found = LayerChain(module, path, axis, free - roles.keys()).grown(node)
                roles |= found or {}
    return roles


@dataclass
class LayerChain:
    """What grows from one layer: how each node is cut, and the role of each layer."""

    module: nn.Module
    path: str
    axis: Axis
    free: set[str]
    flows: dict[fx.Node, Layout] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    ends: set[fx.Node] = field(default_factory=set)

    def grown(self, start: fx.Node) -> dict[str, Role] | None:
        """All roles, where every use of every cut value is one that works and there is a row."""
        todo = [start] if self.opened(start) else []
        while todo:
            for user in todo.pop().users:
                if user in self.flows or user in self.ends:
                    continue
                if self.closed(user):
                    continue
                flow = self.passed(user)
                if flow is None:
                    return None
                self.flows[user] = flow
                todo.append(user)
                for beside in self.beside(user):
                    more = self.traced_back(beside, flow)
                    if more is None:
                        return None
                    todo += more
        return self.roles if self.ends else None

    def layer(self, node: Any) -> nn.Module | None:
        """The layer that a node calls, if it may have a role."""
        if not (isinstance(node, fx.Node) and node.op == "call_module" and self.name(node) in self.free):
            return None
        return self.module.get_submodule(str(node.target))

    def name(self, node: fx.Node) -> str:
        """The path of the layer that a node calls, in the whole model."""
        return f"{self.path}.{node.target}" if self.path else str(node.target)

    def opened(self, node: fx.Node) -> bool:
        """Make a layer a column, if it can be one."""
        layer = self.layer(node)
        known = None if layer is None else kind(layer)
        if layer is None or known is None or groups(layer) > 1 or not only_input(node):
            return False
        count = width(layer, known.outputs)
        if count < self.axis.size:
            return False
        self.flows[node] = Layout(self.axis.cuts(count), type(layer) in CONVOLUTIONS)
        self.roles[self.name(node)] = Role("column", self.axis.cuts(count), sliced=True)
        return True

    def closed(self, node: fx.Node) -> bool:
        """Make a layer a row, if it can be one for what it takes."""
        layer, flow = self.layer(node), next((self.flows.get(each) for each in node.all_input_nodes), None)
        known = None if layer is None else kind(layer)
        if layer is None or known is None or flow is None or groups(layer) > 1 or not only_input(node):
            return False
        inputs, channels = width(layer, known.inputs), sum(flow.sizes)
        if flow.spatial != (type(layer) in CONVOLUTIONS) or inputs % channels or (inputs != channels and not flow.flat):
            return False
        self.roles[self.name(node)] = Role("row", tuple(size * inputs // channels for size in flow.sizes), sliced=True)
        self.ends.add(node)
        return True

    def passed(self, node: fx.Node) -> Layout | None:
        """How what a node makes is cut; None where it needs more than its own channels."""
        flow = next(self.flows[each] for each in node.all_input_nodes if each in self.flows)
        if node.op == "call_module":
            return self.through(node, flow) if only_input(node) else None
        if node.op == "call_function" and node.target in (torch.flatten,):
            return flattened(flow, node.args[1:], node.kwargs)
        if node.op == "call_method" and node.target == "flatten":
            return flattened(flow, node.args[1:], node.kwargs)
        pointwise = node.target in (FUNCTIONS if node.op == "call_function" else METHODS)
        pool = node.op == "call_function" and node.target in POOLS and flow.spatial
        return flow if node.op in ("call_function", "call_method") and (pointwise or pool) else None

    def through(self, node: fx.Node, flow: Layout) -> Layout | None:
        """The same for a layer, which may have to take part."""
        layer = self.module.get_submodule(str(node.target))
        if isinstance(layer, POINTWISE) or (flow.spatial and isinstance(layer, PER_CHANNEL)):
            return flow
        if isinstance(layer, nn.Flatten):
            return flattened(flow, (layer.start_dim, layer.end_dim), {})
        role = None if self.name(node) not in self.free else taking_part(layer, flow)
        if role is None:
            return None
        self.roles[self.name(node)] = role
        return flow if role.style != "groups" else Layout(role.sizes, flow.spatial)

    def beside(self, node: fx.Node) -> list[fx.Node]:
        """Tensors that a node takes which are not known to be cut."""
        return [each for each in node.all_input_nodes if each not in self.flows]

    def traced_back(self, node: fx.Node, wanted: Layout) -> list[fx.Node] | None:
        """Cut what meets a cut value too: back to a layer that can be a column; None where there is none."""
        way = [node]
        while not self.opened(way[-1]):
            inputs = way[-1].all_input_nodes
            if len(inputs) != 1 or way[-1].op not in ("call_module", "call_function", "call_method"):
                return None
            if inputs[0] in self.flows:
                way.append(inputs[0])
                break
            way.append(inputs[0])
        for source, target in zip(reversed(way[1:]), reversed(way[:-1]), strict=True):
            flow = self.passed(target) if source in self.flows else None
            if flow is None:
                return None
            self.flows[target] = flow
        return way if self.flows[node] == wanted else None


def only_input(node: fx.Node) -> bool:
    """Whether a layer is called with one tensor and nothing else."""
    return len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node)


def flattened(flow: Layout, given: tuple[Any, ...], named: dict[str, Any]) -> Layout | None:
    """Channels and spatial dims as features, which are cut alike because channels come first."""
    start = given[0] if given else named.get("start_dim", 0)
    end = given[1] if len(given) > 1 else named.get("end_dim", -1)
    return Layout(flow.sizes, spatial=False, flat=True) if flow.spatial and (start, end) == (1, -1) else None


def taking_part(layer: nn.Module, flow: Layout) -> Role | None:
    """The role of a layer with weights or random numbers that works on each channel alone."""
    if isinstance(layer, RANDOM):
        return Role("random")
    channels = sum(flow.sizes)
    if type(layer) in BATCH_NORMS and not flow.flat and (flow.spatial or type(layer) is nn.BatchNorm1d):
        return Role("channels", flow.sizes)
    if type(layer) in INSTANCE_NORMS and flow.spatial:
        return Role("channels", flow.sizes)
    if type(layer) is nn.GroupNorm and flow.spatial:
        fits = all(size * layer.num_groups % channels == 0 for size in flow.sizes)
        return Role("channels", flow.sizes) if fits else None
    if type(layer) in CONVOLUTIONS and flow.spatial and groups(layer) > 1:
        fits = all(size * groups(layer) % channels == 0 for size in flow.sizes)
        outputs = width(layer, 0)
        return Role("groups", tuple(size * outputs // channels for size in flow.sizes), sliced=True) if fits else None
    return None
