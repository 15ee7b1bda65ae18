"""Any model that torch.export can follow, cut where the fewest bytes are sent between stages: the last resort."""

import sys
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_unflatten

from stretto.errors import UsageError
from stretto.nn.batch import Named
from stretto.nn.preserve import device_of, unchanged, undisturbed
from stretto.splitting.balance import cheapest
from stretto.splitting.boundary_values import ValueKind, num_leaves
from stretto.splitting.cost import Inputs
from stretto.splitting.export.modes import merge, path_of
from stretto.splitting.export.repairs import CHECKED, masks_as_given, output_held_back, with_local_shapes
from stretto.splitting.forward_arguments import ForwardCall, find_call
from stretto.splitting.fx.graph import RecordedForward, place
from stretto.splitting.fx.traced import Traced
from stretto.splitting.fx.tracer import is_record
from stretto.splitting.graph_module import GraphModule
from stretto.splitting.graph_operations import OperationRecorder, held_together
from stretto.splitting.parts import tally, tied
from stretto.splitting.proof import Proof, compare_outputs

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


class Exported(Traced):
    """The exported forward of a model, in pieces of one costly operation each.

    An operation is costly if torch counts FLOPs for it, or if it reads a weight matrix. All cuts between two costly
    operations balance equally, so pieces meet where the fewest bytes pass; of equal positions, at the last:

        conv2d  batch_norm  relu_  |  conv2d  add  relu  |  mean  linear
        --------- piece 0 --------   ----- piece 1 -----   -- piece 2 --

    No cut separates operations that share a changing buffer or a tensor changed in place. Of the values sent to the
    next stage, the one computed last comes first.
    """

    noun = "piece"

    def __init__(
        self, model: nn.Module, inputs: Inputs, names: Sequence[str] | None, reason: str, *, together: bool
    ) -> None:
        call = find_call(model, len(inputs), names)
        inputs = several_rows(inputs)
        self._reason = reason
        super().__init__(model, call, export(model, call, inputs), inputs)
        names = [self.name(index, index + 1) for index in range(len(self))]
        self.joints = tied(self._parameters(), names) if together else {}

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, start: int, stop: int) -> str:
        """The pieces from `start` up to `stop`, with the modules of their costly operations, for messages."""
        first, last = (self._costly[index] for index in (start, stop - 1))
        where = path_of(first) or first.name
        if stop == start + 1:
            return f"piece {start} ({where})"
        return f"pieces {start} to {stop - 1} ({where} to {path_of(last) or last.name})"

    def kinds(self, start: int, stop: int) -> str:
        """The classes of the innermost modules whose forwards the pieces from `start` up to `stop` come from."""
        paths = dict.fromkeys(path_of(node) for node in self._graph.nodes if self._in_units(node, start, stop))
        modules = dict(self._model.named_modules())
        return tally(modules[path] for path in paths if path in modules and not list(modules[path].children()))

    def notes(self, bounds: Sequence[int]) -> list[str]:
        """Why the model was exported, what each stage sends, and which pieces had to stay together."""
        sent = []
        for index, position in enumerate(bounds[1:-1]):
            names = ", ".join(node.name for node in self._sent_whole(position))
            sent.append(f"sent from stage {index} to stage {index + 1}: {self._bytes[position]:,} bytes ({names})")
        outputs = [f"output: {', '.join(self._outputs)}"] if self._outputs else []
        return [f"cut by torch.export: {self._reason}", *sent, *outputs, *super().notes(bounds)]

    def divisible(self, index: int) -> bool:
        """False: a piece is one costly operation, or operations that no cut may separate."""
        return False

    def choose(self, costs: Sequence[int], units: Sequence[int], num_stages: int) -> list[int]:
        """Of all nearly even stages, those with the fewest bytes sent between them."""
        return cheapest(costs, [self._bytes[unit] for unit in units], num_stages)

    def verify(self, stages: Sequence[nn.Module], inputs: Inputs | None) -> Proof:
        """On one row fewer, too, since any number of rows will do."""
        assert self._inputs is not None
        proof = super().verify(stages, self._inputs)
        rows = len(self._inputs[0]) if self._inputs[0].dim() else 0
        if rows > 2:
            fewer = tuple(x[:-1] if x.dim() and len(x) == rows else x for x in self._inputs)
            compare_outputs(self.original, stages, fewer, self.why_different())
        return proof

    def why_different(self) -> str:
        """An operation that is not recorded."""
        return f"its forward does not do what torch.export recorded. {REMEDY}"

    def _number(self) -> dict[fx.Node, int]:
        order = [node for node in self._graph.nodes if self._computes(node)]
        self._divide(self._operation_units(order))
        recorders = list(self._record_operations())
        barred = held_together(order, recorders)
        self._costly = self._costly_operations(order, recorders[0])
        positions = {node: position for position, node in enumerate(order)}
        self._starts, self._bytes, last_costly = [0], {0: 0}, self._costly[0]
        costly = [last_costly]
        for node in self._costly[1:]:
            allowed = (p for p in range(positions[last_costly] + 1, positions[node] + 1) if p not in barred)
            sizes = {p: size for p in allowed if (size := self._size(p, recorders[0])) is not None}
            last_costly = node
            if sizes:
                self._starts.append(min(sizes, key=lambda p: (sizes[p], -p)))
                self._bytes[len(self._starts) - 1] = sizes[self._starts[-1]]
                costly.append(node)
        self._costly = costly
        self._bytes[len(self._starts)] = 0
        return {node: bisect_right(self._starts, place) - 1 for node, place in self._units.items()}

    def _operation_units(self, order: Sequence[fx.Node]) -> dict[fx.Node, int]:
        # One unit for each operation; nodes that every stage computes itself join the next operation's unit.
        units, position = {}, 0
        for node in self._graph.nodes:
            units[node] = min(position, len(order) - 1)
            position += self._computes(node)
        return units

    def _costly_operations(self, order: Sequence[fx.Node], recorder: OperationRecorder) -> list[fx.Node]:
        def reads_matrix(node: fx.Node) -> bool:
            attributes = [self._targets[str(used.target)] for used in node.all_input_nodes if used.op == "get_attr"]
            return any(isinstance(value, nn.Parameter) and value.dim() > 1 for value in attributes)

        return [node for node in order if recorder.records[node].flops or reads_matrix(node)] or list(order)

    def _size(self, position: int, recorder: OperationRecorder) -> int | None:
        # Bytes of the example sent across a cut at `position`; None if no cut is possible there.
        live = self._live(position)
        sent = [node for node in live if not self._outlined(node, position)]
        certain = [node for node in sent if self._forms[node] is not ValueKind.OPTIONAL]
        if any(self._forms[node] in (ValueKind.STUCK, ValueKind.PLAIN) for node in live):
            return None
        if not sum(num_leaves(self._forms[node]) for node in certain):
            return None
        return sum(recorder.records[node].num_bytes for node in sent)

    def _first(self, position: int, live: Sequence[fx.Node]) -> fx.Node | None:
        # The tensor computed last of those that carry a gradient.
        return next((n for n in reversed(live) if self._forms[n] is ValueKind.TENSOR and n.op != "placeholder"), None)


def several_rows(inputs: Inputs) -> Inputs:
    """The inputs, a batch of one row repeated to two: torch.export treats the size 1 as fixed."""
    if inputs[0].dim() and len(inputs[0]) == 1:
        return tuple(torch.cat([x, x]) if x.dim() and len(x) == 1 else x for x in inputs)
    return inputs
