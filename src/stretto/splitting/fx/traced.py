"""A model's forward as a graph, cut between units of it."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from stretto.errors import UsageError
from stretto.nn.chain import Chain
from stretto.nn.preserve import home, members, trainable, undisturbed
from stretto.splitting.assembly import assemble
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
from stretto.splitting.fx.decisions import asks
from stretto.splitting.fx.graph import RecordedForward
from stretto.splitting.operations import OperationRecorder
from stretto.splitting.parts import Joint, SplitParts


class Traced(SplitParts):
    """A recorded forward in units, runs of consecutive nodes.

    A value that a later unit needs travels through the stages between; of a tensor whose shape alone is needed, its
    outline. Weights, buffers and constants do not travel, nor do shapes and numbers: each stage takes or computes its
    own.
    """

    def __init__(self, model: nn.Module, call: ForwardCall, recorded: RecordedForward, inputs: Inputs | None) -> None:
        self._model = model
        self._call = call
        self._inputs = inputs
        self._graph, self._targets, self._outputs = recorded
        self._persistent = set(model.state_dict())
        self._forms = guess_forms(self._graph) if inputs is None else self._watch(inputs)
        self._divide(self._number())

    def cut(self, bounds: Sequence[int]) -> list[nn.Module]:
        """Each stage a GraphModule on the model's own modules, parameters and buffers, under their own names."""
        kind = type(self._model).__name__
        return [
            assemble(self._stage(start, stop), self._targets, self._persistent, self._model, f"{kind}Stage{index}")
            for index, (start, stop) in enumerate(pairwise(bounds))
        ]

    def verify(self, stages: Sequence[nn.Module]) -> None:
        """Run the example through the model and through the stages. Raises UsageError if they differ."""
        if self._inputs is not None:
            self._compare(stages, self._inputs)

    @abstractmethod
    def _number(self) -> dict[fx.Node, int]:
        """Which unit each node belongs to."""

    @abstractmethod
    def _first(self, position: int, live: Sequence[fx.Node]) -> fx.Node | None:
        """Which of the values that travel to a unit comes first."""

    @abstractmethod
    def _why_different(self) -> str:
        """What is wrong if stages do not give what the model gives, and what to do about it."""

    def _compare(
        self, stages: Sequence[nn.Module], inputs: Inputs, modes: Mapping[nn.Module, bool] | None = None
    ) -> None:
        # In evaluation, or in these modes.
        outputs = []
        for run in (partial(self._call.run, self._model, inputs), partial(Chain(*stages), *inputs)):
            with undisturbed([self._model, *stages], home([self._model])), torch.no_grad():
                for module, training in (modes or {}).items():
                    module.training = training
                torch.manual_seed(0)  # for what draws in evaluation, too
                outputs.append(tensors_of(run()))
        wanted, found = outputs
        if len(wanted) < len(found) or not all(map(close, wanted, found)):
            raise UsageError(
                f"the stages of {type(self._model).__name__} do not give what the model gives for the example: "
                f"{self._why_different()}"
            )

    def _watch(self, inputs: Inputs) -> dict[fx.Node, Form]:
        # Run the example once and see what every node gives.
        module = assemble(self._graph, self._targets, self._persistent, self._model, "Whole")
        watch = FormRecorder(module, self._call.hint)
        with undisturbed([self._model, module], home([module])), trainable(self._model):
            watch.run(*inputs)
        return watch.forms

    def _look(self) -> Iterator[OperationRecorder]:
        # In evaluation, then in training.
        assert self._inputs is not None
        module = assemble(self._graph, self._targets, self._persistent, self._model, "Whole")
        for training in (False, True):
            with undisturbed([self._model, module], home([module])):
                module.train(training)
                look = OperationRecorder(module)
                look.run(*self._inputs)
            yield look

    def _computes(self, node: fx.Node) -> bool:
        return node.op not in ("placeholder", "output") and not self._own(node)

    def _divide(self, units: dict[fx.Node, int]) -> None:
        # What follows from where the units are.
        self._units = units
        self._last_use, self._last_read = self._uses()
        self._members: dict[int, list[fx.Node]] = {}
        self._travellers: dict[int, list[fx.Node]] = {}  # by the unit that they travel to, in order
        for node in self._graph.nodes:
            self._members.setdefault(units[node], []).append(node)
            if not self._own(node):
                for position in range(units[node] + 1, self._last_use.get(node, -1) + 1):
                    self._travellers.setdefault(position, []).append(node)

    def _own(self, node: fx.Node) -> bool:
        # Whether each stage takes or computes this node for itself.
        return node.op == "get_attr" or (
            self._forms[node] is ValueKind.PLAIN and node.op in ("call_function", "call_method") and bool(node.users)
        )

    def _in(self, node: fx.Node, start: int, stop: int) -> bool:
        return start <= self._units[node] < stop

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        # What a node needs computed, and what the stage takes or computes for itself on the way there.
        found: dict[fx.Node, None] = {}
        pending = list(node.all_input_nodes)
        while pending:
            source = pending.pop()
            if source not in found:
                found[source] = None
                pending += source.all_input_nodes if self._own(source) else []
        return list(found)

    def _uses(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        # The last unit that needs what a node gives, and the last one that needs more of it than its shape.
        needs: dict[fx.Node, int] = {}
        reads: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if not self._own(node):
                unit, sources = self._units[node], self._sources(node)
                readers = [node, *(source for source in sources if self._own(source) and not asks(source))]
                read = {each for reader in readers for each in reader.all_input_nodes}
                for source in sources:
                    needs[source] = max(needs.get(source, 0), unit)
                    if source in read:
                        reads[source] = max(reads.get(source, 0), unit)
        return needs, reads

    def _outlined(self, node: fx.Node, position: int) -> bool:
        # Whether the units from there on need no more of a tensor than its shape.
        return self._forms[node] in (ValueKind.TENSOR, ValueKind.FIXED) and self._last_read.get(node, -1) < position

    def _live(self, position: int) -> list[fx.Node]:
        # What travels from unit position - 1 to unit position, in order, but last what may be None.
        live = self._travellers.get(position, [])
        first = self._first(position, live)
        ordered = live if first is None else [first, *(node for node in live if node is not first)]
        return sorted(ordered, key=lambda node: self._forms[node] is ValueKind.OPTIONAL)

    def _travels(self, position: int) -> list[fx.Node]:
        # What travels there as more than an outline.
        return [node for node in self._live(position) if not self._outlined(node, position)]

    def _obstacle(self, position: int, names: Sequence[str]) -> Joint | None:
        # Why there can be no cut before this unit.
        for node in self._live(position):
            if self._forms[node] in (ValueKind.STUCK, ValueKind.PLAIN):
                return Joint(
                    f"{names[position - 1]} and {names[position]} pass {node.name!r} on, which is neither a tensor nor "
                    "a tuple or list of tensors",
                    "pass tensors from block to block",
                )
        certain = [node for node in self._travels(position) if self._forms[node] is not ValueKind.OPTIONAL]
        if not sum(num_leaves(self._forms[node]) for node in certain):
            return Joint(f"nothing passes from {names[position - 1]} to {names[position]}", "use what the block gives")
        return None

    def _parameters(self) -> list[dict[str, nn.Parameter]]:
        # What each unit uses, by name.
        owned: list[dict[str, nn.Parameter]] = [{} for _ in range(len(self))]
        for node in self._graph.nodes:
            if self._own(node):
                continue
            for used in (node, *self._sources(node)):
                value = self._targets.get(used.target) if isinstance(used.target, str) else None
                if used.op == "get_attr" and isinstance(value, nn.Parameter):
                    owned[self._units[node]][used.target] = value
                elif used is node and node.op == "call_module" and isinstance(value, nn.Module):
                    own = {f"{node.target}.{name}": p for name, p in value.named_parameters()}
                    owned[self._units[node]].update(own)
        return owned

    def _stage(self, start: int, stop: int) -> fx.Graph:
        # The units start up to stop as a graph of their own.
        graph = fx.Graph()
        values: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            if node not in values:
                assert self._own(node), f"{node} is not there in units {start} to {stop}"
                values[node] = graph.node_copy(node, value)
            return values[node]

        for node in self._live(start) if start else ():
            if self._outlined(node, start):
                values[node] = graph.call_function(stand_in, (graph.placeholder(node.name),))
            else:
                values[node] = rebuild(graph, self._forms[node], node.name)
        for unit in range(start, stop):
            for node in self._members.get(unit, ()):
                if node.op != "output" and not self._own(node):
                    values[node] = graph.node_copy(node, value)
        if stop == len(self):
            graph.output(map_arg(self._graph.output_node().args[0], value))
            return graph
        given: list[fx.Node] = []
        for node in self._live(stop):
            if self._outlined(node, stop):
                given.append(graph.call_function(outline, (values[node],)))
            elif self._forms[node] is ValueKind.OPTIONAL:
                given.append(graph.call_function(pack, (values[node], given[0])))
            else:
                given += leaves(graph, values[node], self._forms[node])
        graph.output(given[0] if len(given) == 1 else tuple(given))
        return graph


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """The tensors that a model returned, by name or not."""
    return members(tuple(output.values()) if isinstance(output, Mapping) else output)


def close(wanted: Tensor, found: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    scale = float(wanted.abs().amax()) if wanted.numel() and wanted.is_floating_point() else 0.0
    return torch.allclose(wanted, found, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)
