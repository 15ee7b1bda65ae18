"""A model's recorded forward, cut between units: runs of consecutive nodes."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from stretto.errors import UsageError
from stretto.nn import deferred
from stretto.nn.preserve import device_of, trainable, undisturbed
from stretto.splitting.boundary_values import (
    Form,
    FormRecorder,
    ValueKind,
    guess_forms,
    leaves,
    num_leaves,
    outline,
    pack,
    rebuild,
    stand_in,
)
from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import ForwardCall
from stretto.splitting.fx.graph import REMEDY, RecordedForward, TraceError
from stretto.splitting.fx.tracer import reads_metadata
from stretto.splitting.graph_module import assemble
from stretto.splitting.graph_operations import OperationRecorder
from stretto.splitting.parts import Joint, SplitParts
from stretto.splitting.proof import Original


class Traced(SplitParts):
    """A recorded forward in units, runs of consecutive nodes.

    A value that a later unit needs is sent through all stages between; of a tensor whose shape alone is needed, only
    its outline (see `outline`). Weights, buffers, constants, shapes and numbers are not sent: each stage holds or
    computes its own.
    """

    def __init__(self, model: nn.Module, call: ForwardCall, recorded: RecordedForward, inputs: Inputs | None) -> None:
        self._model = model
        self._call = call
        self._inputs = inputs
        self._graph, self._targets, self._outputs = recorded
        self._persistent = set(model.state_dict())
        self._forms = guess_forms(self._graph) if inputs is None else self._record_forms(inputs)
        self._divide(self._number())

    def cut(self, bounds: Sequence[int]) -> list[nn.Module]:
        """Each stage as a GraphModule on the model's own modules, parameters and buffers, under their own names."""
        kind = type(self._model).__name__
        return [
            assemble(self._stage(start, stop), self._targets, self._persistent, self._model, f"{kind}Stage{index}")
            for index, (start, stop) in enumerate(pairwise(bounds))
        ]

    @property
    def original(self) -> Original:
        """The model, called as the batch fills its arguments."""
        return Original(lambda *x: self._call.run(self._model, x), [self._model], type(self._model).__name__)

    @abstractmethod
    def _number(self) -> dict[fx.Node, int]:
        """The unit of each node."""

    @abstractmethod
    def _first(self, position: int, live: Sequence[fx.Node]) -> fx.Node | None:
        """Which of the values sent to unit `position` comes first; None for no preference."""

    def _record_forms(self, inputs: Inputs) -> dict[fx.Node, Form]:
        # Run the example once and record the form of every node's value.
        module = assemble(self._graph, self._targets, self._persistent, self._model, "Whole")
        recorder = FormRecorder(module, self._call.hint)
        with (
            undisturbed([self._model, module], device_of([module])),
            trainable(self._model),
            deferred.faked([self._model, module]),
        ):
            try:
                recorder.run(*inputs)
            except UsageError as error:
                if not self._takes(inputs):
                    raise
                said = str(error).partition(". Give an example")[0].removeprefix("the model fails on the example ")
                raise TraceError(
                    f"{type(self._model).__name__}.forward is recorded without something that it needs, since the "
                    f"model takes the example and the record fails {said}. {REMEDY}"
                ) from error
        return recorder.forms

    def _takes(self, inputs: Inputs) -> bool:
        # Whether the model itself takes the example.
        with torch.no_grad(), suppress(Exception):
            self._call.run(self._model, inputs)
            return True
        return False

    def _record_operations(self) -> Iterator[OperationRecorder]:
        # Records of the example's operations in evaluation, then in training.
        assert self._inputs is not None
        module = assemble(self._graph, self._targets, self._persistent, self._model, "Whole")
        for training in (False, True):
            with undisturbed([self._model, module], device_of([module])):
                module.train(training)
                recorder = OperationRecorder(module)
                recorder.run(*self._inputs)
            yield recorder

    def _computes(self, node: fx.Node) -> bool:
        return node.op not in ("placeholder", "output") and not self._is_local(node)

    def _divide(self, units: dict[fx.Node, int]) -> None:
        # Derive the members, the last uses and the values sent from each node's unit.
        self._units = units
        self._last_use, self._last_read = self._uses()
        self._members: dict[int, list[fx.Node]] = {}
        self._sent_to: dict[int, list[fx.Node]] = {}  # the values sent to each unit, in order
        for node in self._graph.nodes:
            self._members.setdefault(units[node], []).append(node)
            if not self._is_local(node):
                for position in range(units[node] + 1, self._last_use.get(node, -1) + 1):
                    self._sent_to.setdefault(position, []).append(node)

    def _is_local(self, node: fx.Node) -> bool:
        # Whether each stage holds or computes this node's value itself, so that it is never sent.
        return node.op == "get_attr" or (
            self._forms[node] is ValueKind.PLAIN and node.op in ("call_function", "call_method") and bool(node.users)
        )

    def _in_units(self, node: fx.Node, start: int, stop: int) -> bool:
        return start <= self._units[node] < stop

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        # The nodes whose values a node needs, through the local nodes between.
        sources: dict[fx.Node, None] = {}
        pending = list(node.all_input_nodes)
        while pending:
            source = pending.pop()
            if source not in sources:
                sources[source] = None
                pending += source.all_input_nodes if self._is_local(source) else []
        return list(sources)

    def _uses(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        # For each node, the last unit that needs its value, and the last unit that needs more of it than its shape.
        last_use: dict[fx.Node, int] = {}
        last_read: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if not self._is_local(node):
                unit, sources = self._units[node], self._sources(node)
                readers = [
                    node,
                    *(source for source in sources if self._is_local(source) and not reads_metadata(source)),
                ]
                read = {used for reader in readers for used in reader.all_input_nodes}
                for source in sources:
                    last_use[source] = max(last_use.get(source, 0), unit)
                    if source in read:
                        last_read[source] = max(last_read.get(source, 0), unit)
        return last_use, last_read

    def _outlined(self, node: fx.Node, position: int) -> bool:
        # Whether the units from `position` on need only the shape of this tensor.
        return self._forms[node] in (ValueKind.TENSOR, ValueKind.FIXED) and self._last_read.get(node, -1) < position

    def _live(self, position: int) -> list[fx.Node]:
        # The values sent from unit position - 1 to unit position, in order; optional ones last.
        live = self._sent_to.get(position, [])
        first = self._first(position, live)
        ordered = live if first is None else [first, *(node for node in live if node is not first)]
        return sorted(ordered, key=lambda node: self._forms[node] is ValueKind.OPTIONAL)

    def _sent_whole(self, position: int) -> list[fx.Node]:
        # The values sent to unit `position` as more than an outline.
        return [node for node in self._live(position) if not self._outlined(node, position)]

    def _obstacle(self, position: int, names: Sequence[str]) -> Joint | None:
        # The Joint that forbids a cut before unit `position`, if there is one.
        for node in self._live(position):
            if self._forms[node] in (ValueKind.STUCK, ValueKind.PLAIN):
                return Joint(
                    f"{names[position - 1]} and {names[position]} pass {node.name!r} on, which is neither a tensor nor "
                    "a tuple or list of tensors",
                    "pass tensors from block to block",
                )
        certain = [node for node in self._sent_whole(position) if self._forms[node] is not ValueKind.OPTIONAL]
        if not sum(num_leaves(self._forms[node]) for node in certain):
            return Joint(
                f"nothing passes from {names[position - 1]} to {names[position]}", "use the output of each block"
            )
        return None

    def _parameters(self) -> list[dict[str, nn.Parameter]]:
        # The parameters that each unit uses, by name.
        unit_parameters: list[dict[str, nn.Parameter]] = [{} for _ in range(len(self))]
        for node in self._graph.nodes:
            if self._is_local(node):
                continue
            for used in (node, *self._sources(node)):
                value = self._targets.get(used.target) if isinstance(used.target, str) else None
                if used.op == "get_attr" and isinstance(value, nn.Parameter):
                    unit_parameters[self._units[node]][used.target] = value
                elif used is node and node.op == "call_module" and isinstance(value, nn.Module):
                    module_parameters = {f"{node.target}.{name}": p for name, p in value.named_parameters()}
                    unit_parameters[self._units[node]].update(module_parameters)
        return unit_parameters

    def _stage(self, start: int, stop: int) -> fx.Graph:
        # The units from `start` up to `stop` as a graph of their own.
        graph = fx.Graph()
        values: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            if node not in values:
                assert self._is_local(node), f"{node} is not sent to units {start} to {stop}"
                values[node] = graph.node_copy(node, value)
            return values[node]

        for node in self._live(start) if start else ():
            if self._outlined(node, start):
                values[node] = graph.call_function(stand_in, (graph.placeholder(node.name),))
            else:
                values[node] = rebuild(graph, self._forms[node], node.name)
        for unit in range(start, stop):
            for node in self._members.get(unit, ()):
                if node.op != "output" and not self._is_local(node):
                    values[node] = graph.node_copy(node, value)
        if stop == len(self):
            graph.output(map_arg(self._graph.output_node().args[0], value))
            return graph
        outputs: list[fx.Node] = []
        for node in self._live(stop):
            if self._outlined(node, stop):
                outputs.append(graph.call_function(outline, (values[node],)))
            elif self._forms[node] is ValueKind.OPTIONAL:
                outputs.append(graph.call_function(pack, (values[node], outputs[0])))
            else:
                outputs += leaves(graph, values[node], self._forms[node])
        graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        return graph
