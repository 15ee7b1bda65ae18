"""A model's forward as torch.export records it: one graph of operations on tensors, parameters and sizes."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_unflatten

from stretto.errors import UsageError
from stretto.nn.preserve import home, unchanged, undisturbed
from stretto.splitting.cost import Inputs
from stretto.splitting.export.local_shapes import with_local_shapes
from stretto.splitting.export.modes import merge
from stretto.splitting.export.quiet import output_held_back
from stretto.splitting.forward_arguments import ForwardCall
from stretto.splitting.fx.graph import RecordedForward, place
from stretto.splitting.fx.tracer import is_record

aten = torch.ops.aten
ROOT = "model"
REMEDY = (
    "torch.export follows a forward that runs the same operations for every batch: decide by nothing that a tensor "
    "holds, do not turn x.shape[0] into a fixed number. Or give split an nn.Sequential, a list of layers, or the path "
    "of a list of blocks that the forward calls one after the other"
)


class Called(nn.Module):
    """The model as a function of a batch's tensors; `outputs` are the names of the tensors it returns, if any."""

    def __init__(self, model: nn.Module, call: ForwardCall) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self.outputs: tuple[str, ...] = ()

    def forward(self, *inputs: Tensor) -> Any:
        """What the model returns; of a record with names (Hugging Face's ModelOutput) its tensors, one bare."""
        output = self._call.run(self.model, inputs)
        if not is_record(output):
            return output
        tensors = {str(name): value for name, value in output.items() if isinstance(value, Tensor)}
        self.outputs = tuple(tensors)
        return next(iter(tensors.values())) if len(tensors) == 1 else tuple(tensors.values())


def export(model: nn.Module, call: ForwardCall, inputs: Inputs) -> RecordedForward:
    """The forward in training and in evaluation, as one graph that does as the module is told that holds it.

    The number of rows (dim 0) is free, from the example's up and down to 1; every other size is the example's.
    Modules that are in evaluation mode while the model trains (frozen norms) stay as they are.
    Raises UsageError, naming the line, where torch.export cannot follow the forward.
    """
    trains = [(module, module.training or not model.training) for module in model.modules()]
    targets: dict[str, Any] = {}
    programs, graphs = [], []
    with unchanged(model), undisturbed([model], home([model])):
        for training in (True, False):
            for module, own in trains:
                module.training = training and own
            called = Called(model, call)
            programs.append(run_export(called, call, inputs))
            graphs.append(with_local_shapes(lower(programs[-1], model, call, targets), home([model])))
    merged = merge(graphs[0], graphs[1], targets, training=model.training)
    check(merged, model, call, inputs, programs)
    return RecordedForward(merged, targets, called.outputs)


def run_export(called: Called, call: ForwardCall, inputs: Inputs) -> Any:
    """What torch.export makes of one mode. Raises UsageError if it cannot."""
    rows = inputs[0].shape[0]
    free = tuple({0: torch.export.Dim.DYNAMIC} if x.dim() and x.shape[0] == rows else None for x in inputs)
    kind = type(called.model).__name__
    try:
        with output_held_back(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about attributes that a forward sets: they are set back
            return torch.export.export(called, inputs, dynamic_shapes=(free,), strict=False)
    except Exception as error:
        text = str(error)
        if "specialized it to be a constant" in text:
            fixed = [name for index, name in enumerate(call.names) if f"['inputs'][{index}].size()[0]" in text]
            raise UsageError(
                f"{kind}.forward takes only as many rows of {', '.join(fixed) or 'its input'} as the example, {rows} "
                f"(torch.export): somewhere it compares x.shape[0] with a number, counts with int(x.shape[0]) or "
                f"writes {rows} into a shape. Use x.shape[0] itself, or -1, so that batches can be of any size"
            ) from error
        lines = [line for line in text.splitlines() if line.strip()]
        raise UsageError(
            f"{kind}.forward cannot be exported{place(error)}: {type(error).__name__}: {lines[0] if lines else ''}"
            f"{call.hint}. {REMEDY}"
        ) from error


def lower(program: Any, model: nn.Module, call: ForwardCall, targets: dict[str, Any]) -> fx.Graph:
    """A graph whose placeholders are the batch's tensors, and which names the model's own parameters and buffers.

    What its names stand for is added to `targets`.
    """
    graph, values = fx.Graph(), dict[fx.Node, Any]()
    names = iter(call.names)
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.target is None:
            values[node] = graph.placeholder(next(names))
        else:
            own = spec.target.removeprefix(f"{ROOT}.")
            found = resolve(model, own)
            if found is None:  # a tensor that the forward makes: torch.tensor([...])
                own, found = known(targets, f"_constants.{own}", program.constants[spec.target])
            targets[own] = found
            values[node] = graph.create_node("get_attr", own)
        values[node].meta = dict(node.meta)
    copy_nodes(program.graph_module, graph, values, targets)
    leaves = [values.get(leaf, leaf) for leaf in program.graph.output_node().args[0]]
    graph.output(tree_unflatten(leaves, program.call_spec.out_spec))
    assigned(graph)
    return graph


def copy_nodes(source: fx.GraphModule, graph: fx.Graph, values: dict[fx.Node, Any], targets: dict[str, Any]) -> None:
    """Append the operations of `source`; `values` says what its nodes are in `graph`."""
    for node in source.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(source, node.target)  # what runs under no_grad or autocast: kept whole
        if node.op != "call_function" or node.target is aten._assert_tensor_metadata.default:
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: held(values[used], graph, targets))
        values[node] = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        values[node].meta = dict(node.meta)


def held(value: Any, graph: fx.Graph, targets: dict[str, Any]) -> Any:
    """A value as an operation's argument; a part of the graph is kept as a module of its own."""
    if not isinstance(value, fx.GraphModule):
        return value
    name, _ = known(targets, "_regions.region", value)
    targets[name] = value
    return graph.create_node("get_attr", name)


def assigned(graph: fx.Graph) -> None:
    """Bring forward what a forward assigns to a buffer: torch.export does all of it at the end."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "get_attr":
            earlier = {*node.all_input_nodes, *node.args[0].users} - {node}
            max(earlier, key=lambda each: order[each]).append(node)


def check(graph: fx.Graph, model: nn.Module, call: ForwardCall, inputs: Inputs, programs: Sequence[Any]) -> None:
    """Refuse a model without an output; hold its batches to what was exported."""
    if not graph.output_node().all_input_nodes:
        raise UsageError(
            f"{type(model).__name__}.forward returns no tensor that comes from its input: return a tensor, or a tuple "
            "of tensors, as the loss takes them"
        )
    placeholders = graph.find_nodes(op="placeholder")
    ranges = [rows_in(program, index) for program in programs for index in range(len(inputs))]
    least, most = max(low for low, _ in ranges), min(high for _, high in ranges)
    with graph.inserting_after(placeholders[-1]):
        for node, name, example in zip(placeholders, call.names, inputs, strict=True):
            free = bool(example.dim()) and example.shape[0] == inputs[0].shape[0]
            shape = [[least, most] if free and not dim else size for dim, size in enumerate(example.shape)]
            graph.call_function(fits, (node, name, shape))


def rows_in(program: Any, index: int) -> tuple[int, int]:
    """How many rows of an input torch.export is sure of: (least, most)."""
    placeholder = [spec for spec in program.graph_signature.input_specs if spec.target is None][index].arg.name
    [value] = [node.meta["val"] for node in program.graph.nodes if node.name == placeholder]
    rows = value.shape[0] if value.dim() else 0
    found = program.range_constraints.get(rows.node.expr) if isinstance(rows, torch.SymInt) else None
    if found is None:
        return 1, sys.maxsize
    most = int(found.upper) if found.upper.is_Integer else sys.maxsize
    return (1 if found.lower <= 2 else int(found.lower)), most  # 2 is what torch.export begins with


def fits(x: Tensor, name: str, shape: Sequence[int | Sequence[int]]) -> None:
    """Part of the first stage: a batch must have the sizes that the model was exported with, or be within limits."""
    limits = [(size, size) if isinstance(size, int) else (size[0], size[1]) for size in shape]
    if x.dim() != len(limits) or not all(
        low <= size <= high for size, (low, high) in zip(x.shape, limits, strict=True)
    ):
        wanted = ", ".join(
            str(low) if low == high else "any" if high == sys.maxsize else f"{low} to {high}" for low, high in limits
        )
        raise UsageError(
            f"{name} is {list(x.shape)}, but the model was split (by torch.export) for [{wanted}]: pad or crop "
            "batches to that, or split it with an example like them"
        )


def resolve(model: nn.Module, target: str) -> Tensor | None:
    """The model's own tensor of that name."""
    value: Any = model
    for item in target.split("."):
        value = getattr(value, item, None)
    return value if isinstance(value, Tensor) else None


def known(targets: Mapping[str, Any], name: str, value: Any) -> tuple[str, Any]:
    """The name, and the object, of something equal that is known by that name; a new name if there is none."""
    number, own = 0, name
    while own in targets and not alike(targets[own], value):
        number += 1
        own = f"{name}_{number}"
    return own, targets.get(own, value)


def alike(one: Any, other: Any) -> bool:
    """Whether two constants, or two parts of a graph, are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return one.code == other.code
    return False
