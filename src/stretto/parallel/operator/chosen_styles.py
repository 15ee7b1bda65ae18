"""The role of each layer: by the user's plan, then attention, known MLPs, chains, and last layers by themselves.

Chains of layers: columns, operations on each channel alone, and rows, with a sum over processes at the end only.

Chains are found in the graph that torch.fx traces, so in nn.Sequential, residual blocks and a user's own forward: every
path from a column's cut output has to lead through operations on each channel alone to a row. Modules that cannot be
traced get no chains, nor do columns from which some path leads elsewhere.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from stretto.errors import UsageError, nearest
from stretto.options.checks import one_of
from stretto.parallel.operator.axis import Axis
from stretto.parallel.operator.heads import AttentionLayers, attentions, too_few
from stretto.parallel.operator.role import CONVOLUTIONS, Role, groups, is_transposed, weight_dims, width

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
class ChannelLayout:
    """How an activation is cut: the number of channels on each process, and where the channels stand.

    `spatial`: before spatial dims; otherwise they are the last dim. `flat`: the last dim is a flattened image, whose
    features are ordered by channel.
    """

    sizes: tuple[int, ...]
    spatial: bool
    flat: bool = False


class Tracer(fx.Tracer):
    """Traces each of torch's layers, and each layer that can be cut, as one node."""

    proxy_buffer_attributes = True  # tracing changes no buffer

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_transposed(m) or super().is_leaf_module(m, module_qualified_name)


def graphs(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, fx.Graph]]:
    """Path, module and graph of the largest submodules that can be traced."""
    if not any(True for _ in module.children()):
        return
    graph = traced(module)
    if graph is not None:
        yield path, module, graph
        return
    for name, child in module.named_children():
        yield from graphs(child, f"{path}.{name}" if path else name)


def traced(module: nn.Module) -> fx.Graph | None:
    """The graph of a module's forward; None where tracing fails. The module's attributes are restored afterwards."""
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
    """The roles of the layers of all chains, by path; layers in `taken` have a role already."""
    roles: dict[str, Role] = {}
    for path, module, graph in graphs(root):
        calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        num_calls = {f"{path}.{target}" if path else target: calls.count(target) for target in calls}
        free = {layer_path for layer_path, count in num_calls.items() if count == 1} - taken
        for node in graph.nodes:
            if node.op == "call_module":
                roles |= LayerChain(module, path, axis, free - roles.keys()).grow(node) or {}
    return roles


@dataclass
class LayerChain:
    """One chain while it is found: the layout of each cut node, the roles of its layers, and its rows.

    Only the layers in `free` may get a role: they are called once and have none yet.
    """

    module: nn.Module
    path: str
    axis: Axis
    free: set[str]
    layouts: dict[fx.Node, ChannelLayout] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    rows: set[fx.Node] = field(default_factory=set)

    def grow(self, start: fx.Node) -> dict[str, Role] | None:
        """The roles of the chain from `start` on; None where a cut value has another use or no row is reached."""
        pending = [start] if self.make_column(start) else []
        while pending:
            for user in pending.pop().users:
                if user in self.layouts or user in self.rows:
                    continue
                if self.make_row(user):
                    continue
                layout = self.output_layout(user)
                if layout is None:
                    return None
                self.layouts[user] = layout
                pending.append(user)
                for uncut in [value for value in user.all_input_nodes if value not in self.layouts]:
                    traced_nodes = self.trace_back(uncut, layout)
                    if traced_nodes is None:
                        return None
                    pending += traced_nodes
        return self.roles if self.rows else None

    def layer(self, node: Any) -> nn.Module | None:
        """The layer that a node calls, if it may have a role."""
        if not (isinstance(node, fx.Node) and node.op == "call_module" and self.name(node) in self.free):
            return None
        return self.module.get_submodule(str(node.target))

    def name(self, node: fx.Node) -> str:
        """The path of the layer that a node calls, in the whole model."""
        return f"{self.path}.{node.target}" if self.path else str(node.target)

    def make_column(self, node: fx.Node) -> bool:
        """Make the node's layer a column; False if it cannot be one."""
        layer = self.layer(node)
        dims = None if layer is None else weight_dims(layer)
        if layer is None or dims is None or groups(layer) > 1 or not only_input(node):
            return False
        count = width(layer, dims.outputs)
        if count < self.axis.size:
            return False
        self.layouts[node] = ChannelLayout(self.axis.cuts(count), type(layer) in CONVOLUTIONS)
        self.roles[self.name(node)] = Role("column", self.axis.cuts(count), sliced=True)
        return True

    def make_row(self, node: fx.Node) -> bool:
        """Make the node's layer a row of its cut input; False if it cannot be one."""
        layer, layout = self.layer(node), next((self.layouts.get(value) for value in node.all_input_nodes), None)
        dims = None if layer is None else weight_dims(layer)
        if layer is None or dims is None or layout is None or groups(layer) > 1 or not only_input(node):
            return False
        inputs, channels = width(layer, dims.inputs), sum(layout.sizes)
        if layout.spatial != (type(layer) in CONVOLUTIONS) or inputs % channels:
            return False
        if inputs != channels and not layout.flat:
            return False
        sizes = tuple(size * inputs // channels for size in layout.sizes)
        self.roles[self.name(node)] = Role("row", sizes, sliced=True)
        self.rows.add(node)
        return True

    def output_layout(self, node: fx.Node) -> ChannelLayout | None:
        """The layout of a node's output; None where an output channel needs other channels of the cut input."""
        layout = next(self.layouts[value] for value in node.all_input_nodes if value in self.layouts)
        if node.op == "call_module":
            return self.layer_layout(node, layout) if only_input(node) else None
        if node.op == "call_function" and node.target in (torch.flatten,):
            return flattened(layout, node.args[1:], node.kwargs)
        if node.op == "call_method" and node.target == "flatten":
            return flattened(layout, node.args[1:], node.kwargs)
        pointwise = node.target in (FUNCTIONS if node.op == "call_function" else METHODS)
        pool = node.op == "call_function" and node.target in POOLS and layout.spatial
        return layout if node.op in ("call_function", "call_method") and (pointwise or pool) else None

    def layer_layout(self, node: fx.Node, layout: ChannelLayout) -> ChannelLayout | None:
        """The layout of a layer's output, as `output_layout`; a layer with weights or random numbers gets a role."""
        layer = self.module.get_submodule(str(node.target))
        if isinstance(layer, POINTWISE) or (layout.spatial and isinstance(layer, PER_CHANNEL)):
            return layout
        if isinstance(layer, nn.Flatten):
            return flattened(layout, (layer.start_dim, layer.end_dim), {})
        role = None if self.name(node) not in self.free else channel_role(layer, layout)
        if role is None:
            return None
        self.roles[self.name(node)] = role
        return layout if role.style != "groups" else ChannelLayout(role.sizes, layout.spatial)

    def trace_back(self, node: fx.Node, needed: ChannelLayout) -> list[fx.Node] | None:
        """Cut a value that is combined with a cut one, such as a residual: make a layer that it comes from a column.

        Returns the nodes from `node` back to that column or to a value that is cut already; None where there is
        neither, or where `node` would not have the layout `needed`.
        """
        nodes = [node]
        while not self.make_column(nodes[-1]):
            inputs = nodes[-1].all_input_nodes
            if len(inputs) != 1 or nodes[-1].op not in ("call_module", "call_function", "call_method"):
                return None
            nodes.append(inputs[0])
            if inputs[0] in self.layouts:
                break
        for source, target in zip(reversed(nodes[1:]), reversed(nodes[:-1]), strict=True):
            layout = self.output_layout(target) if source in self.layouts else None
            if layout is None:
                return None
            self.layouts[target] = layout
        return nodes if self.layouts[node] == needed else None


def only_input(node: fx.Node) -> bool:
    """Whether a layer is called with one tensor and nothing else."""
    return len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node)


def flattened(layout: ChannelLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChannelLayout | None:
    """The layout behind flatten(1, -1) with these arguments: channels stand first, so features are cut as channels."""
    start = args[0] if args else kwargs.get("start_dim", 0)
    end = args[1] if len(args) > 1 else kwargs.get("end_dim", -1)
    return ChannelLayout(layout.sizes, spatial=False, flat=True) if layout.spatial and (start, end) == (1, -1) else None


def channel_role(layer: nn.Module, layout: ChannelLayout) -> Role | None:
    """The role of a layer with weights or random numbers that works on each channel alone; None for any other."""
    if isinstance(layer, RANDOM):
        return Role("random")
    channels = sum(layout.sizes)
    if type(layer) in BATCH_NORMS and not layout.flat and (layout.spatial or type(layer) is nn.BatchNorm1d):
        return Role("channels", layout.sizes)
    if type(layer) in INSTANCE_NORMS and layout.spatial:
        return Role("channels", layout.sizes)
    if type(layer) is nn.GroupNorm and layout.spatial:
        fits = all(size * layer.num_groups % channels == 0 for size in layout.sizes)
        return Role("channels", layout.sizes) if fits else None
    if type(layer) in CONVOLUTIONS and layout.spatial and groups(layer) > 1:
        fits = all(size * groups(layer) % channels == 0 for size in layout.sizes)
        outputs = width(layer, 0)
        return Role("groups", tuple(size * outputs // channels for size in layout.sizes), sliced=True) if fits else None
    return None


STYLES = ("column", "row", "column-sliced", "row-sliced", "vocabulary", "replicate")
NAMED_EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings", "tok_embeddings", "token")
MLP_PAIRS = (  # MLPs whose two layers are in different modules (BERT, ViT), or whose first has pairs of rows (gates)
    ("intermediate.dense", "output.dense"),
    ("gates", "narrow"),
)


def roles(module: nn.Module, axis: Axis, plan: Mapping[str, str]) -> tuple[dict[str, Role], list[AttentionLayers]]:
    check(module, plan)
    role_of = {
        path: planned_role(module.get_submodule(path), path, style, axis) for path, style in planned(module, plan)
    }
    role_of |= {path: Role("replicate") for path in tied(module) if path not in role_of}
    cut = []
    for attention in attentions(module):
        paths = {attention.query, *attention.others, attention.output}
        if not paths & role_of.keys():
            role_of |= attention.roles(module, axis)
            cut.append(attention)
    for known_roles in (torch_transformer_roles(module, axis), mlp_roles(module, axis)):
        role_of |= {path: role for path, role in known_roles.items() if path not in role_of}
    role_of |= chains(module, axis, set(role_of))
    return role_of | dict(single_layer_roles(module, axis, set(role_of))), cut


def check(module: nn.Module, plan: Mapping[str, str]) -> None:
    """Refuse a plan with unknown paths or styles."""
    paths = {path for path, _ in module.named_modules()}
    for path, style in plan.items():
        if path not in paths:
            raise UsageError(
                f"stretto.parallel.tensor: plan names {path!r}, but the module has no such layer: "
                f"{nearest(path, paths - {''})}"
            )
        one_of(f"stretto.parallel.tensor: plan[{path!r}]", style, STYLES)


def planned(module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path and style of each layer in a plan; "replicate" holds for all layers in a module. Longer paths come last."""
    for path in sorted(plan):
        if plan[path] == "replicate":
            for inner_path, _ in module.get_submodule(path).named_modules(prefix=path):
                yield inner_path, "replicate"
        else:
            yield path, plan[path]


def planned_role(layer: nn.Module, path: str, style: str, axis: Axis) -> Role:
    """The role that a plan gives a layer. Raises UsageError if the layer does not suit the style or the axis."""
    if style == "replicate":
        return Role("replicate")
    where = f'stretto.parallel.tensor: plan["{path}"] is "{style}", but {type(layer).__name__}'
    if style == "vocabulary":
        if type(layer) is not nn.Embedding or not is_plain(layer):
            raise UsageError(f"{where} is no plain nn.Embedding (no padding_idx, max_norm, sparse gradients)")
        return Role("vocabulary", checked(axis.cuts(layer.num_embeddings), where, "rows"))
    dims = weight_dims(layer)
    if dims is None:
        raise UsageError(
            f'{where} is neither nn.Linear nor nn.Conv1d, nn.Conv2d, nn.Conv3d: name such a layer, or use "replicate"'
        )
    if groups(layer) > 1:
        role = groups_role(layer, axis)
        if style != "column" or role is None:
            raise UsageError(
                f'{where} has {groups(layer)} groups: only "column" can cut them, for at most '
                f"{groups(layer)} processes; the tensor axis has {axis.size}"
            )
        return role
    sliced = style.endswith("-sliced")
    if style.startswith("column"):
        return Role("column", checked(axis.cuts(width(layer, dims.outputs)), where, "outputs"), sliced)
    return Role("row", checked(axis.cuts(width(layer, dims.inputs)), where, "inputs"), sliced)


def checked(sizes: tuple[int, ...], where: str, what: str) -> tuple[int, ...]:
    """The sizes of a cut. Raises UsageError if a process would have none."""
    if min(sizes) == 0:
        raise UsageError(
            f"{where} has {sum(sizes)} {what} for {len(sizes)} processes: use at most {sum(sizes)} "
            'on the tensor axis, or use "replicate"'
        )
    return sizes


def tied(module: nn.Module) -> set[str]:
    """Paths of the layers that share a parameter with another; they stay whole, so that they go on sharing it."""
    owners = [(path, parameter) for path, layer in module.named_modules() for parameter in layer._parameters.values()]
    num_owners = Counter(id(parameter) for _, parameter in owners if parameter is not None)
    return {path for path, parameter in owners if num_owners.get(id(parameter), 0) > 1}


def torch_transformer_roles(module: nn.Module, axis: Axis) -> dict[str, Role]:
    """The roles of torch's own attention and of the MLP in torch's transformer layers, by path."""
    role_of: dict[str, Role] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention) and type(layer) is nn.MultiheadAttention:
            if layer.num_heads < axis.size:
                raise too_few(path, layer.num_heads, axis, "heads")
            role_of[path] = Role("attention", axis.cuts(layer.num_heads))
        if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            prefix = f"{path}." if path else ""
            role_of |= pair_roles(module, prefix + "linear1", prefix + "linear2", axis)
            if prefix + "linear1" in role_of:
                role_of[prefix + "dropout"] = Role("random")
    return role_of


def mlp_roles(module: nn.Module, axis: Axis) -> dict[str, Role]:
    """The roles of the layers of MLPs that are known by name, by path."""
    role_of: dict[str, Role] = {}
    for path, _ in module.named_modules():
        for first, second in MLP_PAIRS:
            prefix = f"{path}." if path else ""
            role_of |= pair_roles(module, prefix + first, prefix + second, axis)
    return role_of


def pair_roles(module: nn.Module, first: str, second: str, axis: Axis) -> dict[str, Role]:
    """The roles of a column and the row behind it; none unless both are linear layers whose widths fit."""
    layers = dict(module.named_modules())
    column, row = layers.get(first), layers.get(second)
    if type(column) is not nn.Linear or type(row) is not nn.Linear:
        return {}
    sizes, rows = axis.cuts(row.in_features), 2 if first.rpartition(".")[2] == "gates" else 1  # rows of a hidden unit
    if column.out_features != rows * row.in_features or row.in_features < axis.size:
        return {}
    column_sizes = tuple(rows * size for size in sizes)
    return {first: Role("column", column_sizes, sliced=True), second: Role("row", sizes, sliced=True)}


def single_layer_roles(module: nn.Module, axis: Axis, taken: set[str]) -> Iterator[tuple[str, Role]]:
    """Path and role of each layer that is in no chain: its outputs are cut and gathered again."""
    attention_prefixes = tuple(
        path + "." for path, layer in module.named_modules() if isinstance(layer, nn.MultiheadAttention)
    )
    for path, layer in module.named_modules():
        dims = weight_dims(layer)
        if path in taken or path.startswith(attention_prefixes):
            continue
        if type(layer) is nn.Embedding and path.split(".")[-1] in NAMED_EMBEDDINGS and is_plain(layer):
            sizes = axis.cuts(layer.num_embeddings)
            if min(sizes):
                yield path, Role("vocabulary", sizes)
        if dims is not None and groups(layer) > 1:
            role = groups_role(layer, axis)
            if role is not None:
                yield path, role
        elif dims is not None and width(layer, dims.outputs) >= axis.size:
            yield path, Role("column", axis.cuts(width(layer, dims.outputs)))


def groups_role(layer: nn.Module, axis: Axis) -> Role | None:
    """The role of a convolution whose groups are cut; None where it has fewer groups than there are processes."""
    if type(layer) not in CONVOLUTIONS or groups(layer) < axis.size:
        return None
    group_outputs = width(layer, 0) // groups(layer)
    return Role("groups", tuple(num_groups * group_outputs for num_groups in axis.cuts(groups(layer))))


def is_plain(layer: nn.Embedding) -> bool:
    """Whether an embedding only looks up rows: none of the options that change its forward or gradient is set."""
    return layer.padding_idx is None and layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq
