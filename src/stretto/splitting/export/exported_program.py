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
from stretto.nn.batch import Named
from stretto.nn.preserve import device_of, unchanged, undisturbed
from stretto.splitting.cost import Inputs
from stretto.splitting.export.causal_masks import masks_as_given
from stretto.splitting.export.checked_norms import CHECKED
from stretto.splitting.export.local_shapes import with_local_shapes
from stretto.splitting.export.modes import merge
from stretto.splitting.export.quiet import output_held_back
from stretto.splitting.forward_arguments import ForwardCall
from stretto.splitting.fx.graph import RecordedForward, place
from stretto.splitting.fx.tracer import is_record
from stretto.splitting.graph_module import GraphModule

aten = torch.ops.aten
ROOT = "model"
REMEDY = (
    "torch.export follows a forward that runs the same operations for every batch: decide by nothing that a tensor "
    "holds, do not turn x.shape[0] into a fixed number. Or give split an nn.Sequential, a list of layers, or the path "
    "of a list of blocks that the forward calls one after the other"
)


class ModelCall(nn.Module):
    """The model as a module whose arguments are a batch's tensors; `outputs` names the tensors of a record returned."""

    def __init__(self, model: nn.Module, call: ForwardCall) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self.outputs: tuple[str, ...] = ()

    def forward(self, *inputs: Tensor) -> Any:
        """The model's output; of a Hugging Face ModelOutput, its tensors: one alone, several as a tuple."""
        output = self._call.run(self.model, inputs)
        if not is_record(output):
            return output
        tensors = {str(name): value for name, value in output.items() if isinstance(value, Tensor)}
        self.outputs = tuple(tensors)
        return next(iter(tensors.values())) if len(tensors) == 1 else tuple(tensors.values())


def export(model: nn.Module, call: ForwardCall, inputs: Inputs) -> RecordedForward:
    """The forward in training and in evaluation as one graph, which follows the mode of the module that holds it.

    The number of rows (dim 0) may change, down to 1; every other size is the example's. Modules in evaluation mode
    while the model trains (frozen norms) stay in it. Raises UsageError, with the line, if torch.export cannot follow
    the forward.
    """
    trains = [(module, module.training or not model.training) for module in model.modules()]
    targets: dict[str, Any] = {}
    programs, graphs = [], []
    with unchanged(model), undisturbed([model], device_of([model])):
        for training in (True, False):
            for module, trained in trains:
                module.training = training and trained
            model_call = ModelCall(model, call)
            programs.append(run_export(model_call, call, inputs))
            graphs.append(with_local_shapes(lower(programs[-1], model, call, targets), device_of([model])))
    refuse_other_outputs(model, programs)
    merged = merge(graphs[0], graphs[1], targets, training=model.training)
    check(merged, model, call, inputs, programs)
    return RecordedForward(merged, targets, model_call.outputs)


def run_export(model_call: ModelCall, call: ForwardCall, inputs: Inputs) -> Any:
    """The ExportedProgram of the model in its present mode. Raises UsageError if torch.export fails."""
    rows = inputs[0].shape[0]
    dims = tuple({0: torch.export.Dim.DYNAMIC} if x.dim() and x.shape[0] == rows else None for x in inputs)
    kind = type(model_call.model).__name__
    try:
        with output_held_back(), masks_as_given(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about attributes that a forward sets: `unchanged` restores them
            return torch.export.export(model_call, inputs, dynamic_shapes=(dims,), strict=False)
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


def refuse_other_outputs(model: nn.Module, programs: Sequence[Any]) -> None:
    """Raise UsageError for a forward that returns other outputs in training than in evaluation."""
    trained, evaluated = (program.call_spec.out_spec for program in programs)
    if trained != evaluated:
        counts = [spec.num_leaves for spec in (trained, evaluated)]
        raise UsageError(
            f"{type(model).__name__}.forward returns {counts[0]} outputs in training and {counts[1]} in evaluation, or "
            "arranges them otherwise: return the same in both (the auxiliary ones, too, and use them in the loss in "
            "training alone), or give split a list of layers"
        )


def lower(program: Any, model: nn.Module, call: ForwardCall, targets: dict[str, Any]) -> fx.Graph:
    """The program's graph with the batch's tensors as placeholders, and the model's parameters and buffers by name.

    Adds to `targets` the object of each name.
    """
    graph, values = fx.Graph(), dict[fx.Node, Any]()
    names = iter(call.names)
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.target is None:
            values[node] = graph.placeholder(next(names))
        else:
            target = spec.target.removeprefix(f"{ROOT}.")
            value = resolve(model, target)
            if value is None:  # a constant made in the forward: torch.tensor([...])
                target, value = shared_constant(targets, f"_constants.{target}", program.constants[spec.target])
            targets[target] = value
            values[node] = graph.create_node("get_attr", target)
        values[node].meta = dict(node.meta)
    copy_nodes(program.graph_module, graph, values, targets)
    leaves = [values.get(leaf, leaf) for leaf in program.graph.output_node().args[0]]
    graph.output(tree_unflatten(leaves, program.call_spec.out_spec))
    move_assignments(graph)
    return graph


def copy_nodes(source: fx.GraphModule, graph: fx.Graph, values: dict[fx.Node, Any], targets: dict[str, Any]) -> None:
    """Append the operations of `source` to `graph`; `values` maps nodes of `source` to nodes of `graph`."""
    for node in source.graph.nodes:
        if node.op == "get_attr":
            region = getattr(source, node.target)  # under no_grad or autocast: kept as one module
            values[node] = GraphModule(region, region.graph, class_name="Region")
        if node.op != "call_function" or node.target is aten._assert_tensor_metadata.default:
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: as_argument(values[used], graph, targets))
        operation = CHECKED.get(node.target, node.target)
        values[node] = graph.create_node("call_function", operation, args, kwargs, name=node.name)
        values[node].meta = dict(node.meta)


def as_argument(value: Any, graph: fx.Graph, targets: dict[str, Any]) -> Any:
    """A value as an operation's argument; a GraphModule becomes a get_attr node, its module added to `targets`."""
    if not isinstance(value, fx.GraphModule):
        return value
    name, _ = shared_constant(targets, "_regions.region", value)
    targets[name] = value
    return graph.create_node("get_attr", name)


def move_assignments(graph: fx.Graph) -> None:
    """Move each assignment to a buffer behind the last use of its old value: torch.export puts them all at the end."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "get_attr":
            earlier = {*node.all_input_nodes, *node.args[0].users} - {node}
            max(earlier, key=lambda other: order[other]).append(node)


def check(graph: fx.Graph, model: nn.Module, call: ForwardCall, inputs: Inputs, programs: Sequence[Any]) -> None:
    """Raise UsageError for a model without an output; add nodes that check the sizes of each batch."""
    if not graph.output_node().all_input_nodes:
        raise UsageError(
            f"{type(model).__name__}.forward returns no tensor that comes from its input: return a tensor, or a tuple "
            "of tensors, as the loss takes them"
        )
    placeholders = graph.find_nodes(op="placeholder")
    row_ranges = [rows_in(program, index) for program in programs for index in range(len(inputs))]
    least, most = max(low for low, _ in row_ranges), min(high for _, high in row_ranges)
    with graph.inserting_after(placeholders[-1]):
        for node, name, example in zip(placeholders, call.names, inputs, strict=True):
            has_rows = bool(example.dim()) and example.shape[0] == inputs[0].shape[0]
            shape = [[least, most] if has_rows and not dim else size for dim, size in enumerate(example.shape)]
            graph.call_function(fits, (node, name, shape))


def rows_in(program: Any, index: int) -> tuple[int, int]:
    """The (least, most) number of rows of an input that torch.export proved the program right for."""
    placeholder = [spec for spec in program.graph_signature.input_specs if spec.target is None][index].arg.name
    [value] = [node.meta["val"] for node in program.graph.nodes if node.name == placeholder]
    rows = value.shape[0] if value.dim() else 0
    constraint = program.range_constraints.get(rows.node.expr) if isinstance(rows, torch.SymInt) else None
    if constraint is None:
        return 1, sys.maxsize
    most = int(constraint.upper) if constraint.upper.is_Integer else sys.maxsize
    return (1 if constraint.lower <= 2 else int(constraint.lower)), most  # torch.export assumes at least 2


def fits(x: Tensor, name: str, shape: Sequence[int | Sequence[int]]) -> None:
    """Part of the first stage: raise UsageError for a batch whose sizes the exported program does not take."""
    limits = [(size, size) if isinstance(size, int) else (size[0], size[1]) for size in shape]
    if x.dim() != len(limits) or not all(
        low <= size <= high for size, (low, high) in zip(x.shape, limits, strict=True)
    ):
        expected = ", ".join(
            str(low) if low == high else "any" if high == sys.maxsize else f"{low} to {high}" for low, high in limits
        )
        raise UsageError(
            f"{name} is {list(x.shape)}, but the model was split (by torch.export) for [{expected}]: pad or crop "
            "batches to that, or split it with an example like them"
        )


def refuse_misfit(stage: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raise UsageError if a first stage that was exported does not take these inputs; any number of rows will do.

    The shapes alone are read, so the inputs may be on the meta device.
    """
    for node in fixed_sizes(stage):
        arguments: Any = node.args
        _, name, shape = arguments
        names = [other.name for other in node.graph.find_nodes(op="placeholder")]
        given = dict(zip(inputs.names if isinstance(inputs, Named) else names, inputs, strict=False))
        if name in given:
            fits(given[name], name, [size if isinstance(size, int) else (1, sys.maxsize) for size in shape])


def fixed_sizes(stage: nn.Module) -> list[fx.Node]:
    """The nodes of an exported stage that check a batch's sizes; none in any other stage."""
    graphs = [module.graph for module in stage.modules() if isinstance(module, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.target is fits]


def resolve(model: nn.Module, target: str) -> Tensor | None:
    """The model's tensor of this name; None if it has none."""
    value: Any = model
    for attribute in target.split("."):
        value = getattr(value, attribute, None)
    return value if isinstance(value, Tensor) else None


def shared_constant(targets: Mapping[str, Any], name: str, value: Any) -> tuple[str, Any]:
    """The name and the object in `targets` of a constant equal to `value`; a free name and `value` if there is none."""
    number, candidate = 0, name
    while candidate in targets and not alike(targets[candidate], value):
        number += 1
        candidate = f"{name}_{number}"
    return candidate, targets.get(candidate, value)


def alike(one: Any, other: Any) -> bool:
    """Whether two tensors, or two GraphModules, are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return one.code == other.code
    return False
