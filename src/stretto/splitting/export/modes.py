"""Merge the graphs of a forward in training and in evaluation into one, with a switch wherever the two differ.

training     conv  add_  batch_norm(train)   relu  dropout  linear  rand  div  add
evaluation   conv        batch_norm          relu           linear             add
merged       conv  ------- switch --------   relu  -switch  linear  -switch--  add
"""

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg

from stretto.splitting.graph_module import GraphModule

Pair = tuple[fx.Node, fx.Node]  # the same value in the training graph and in the evaluation graph


class Switch(nn.Module):
    """Runs one graph in training mode, another one in evaluation mode."""

    def __init__(self, trained: fx.GraphModule, evaluated: fx.GraphModule) -> None:
        super().__init__()
        self.trained = trained
        self.evaluated = evaluated

    def forward(self, *inputs: Any) -> Any:
        return (self.trained if self.training else self.evaluated)(*inputs)


def merge(trained: fx.Graph, evaluated: fx.Graph, targets: dict[str, Any], *, training: bool) -> fx.Graph:
    """One graph for both modes. Adds its switches to `targets`, set to the mode `training`."""
    pairs = agreed(*aligned(trained, evaluated))
    merger = Merger(trained, evaluated, pairs, targets, training)
    return merger.run()


def operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, repetitions included."""
    inputs: list[fx.Node] = []

    def collect(source: fx.Node) -> fx.Node:
        inputs.append(source)
        return source

    map_arg((node.args, node.kwargs), collect)
    return inputs


def path_of(node: fx.Node) -> str:
    """The dotted path of the module whose forward an operation comes from; "" for the model."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]).partition(".")[2] if stack else ""


def kind_of(node: fx.Node) -> str:
    """The class of the module whose forward an operation comes from; "" where the graph does not know it."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][1]).rpartition(".")[2] if stack else ""


def signature(node: fx.Node) -> str:
    """A text that is equal for two operations of the same kind, whatever operations give their inputs."""
    place: Any = AnyInput
    return f"{path_of(node)} {node.target} {map_arg((node.args, node.kwargs), place)}"


class AnyInput:
    """Stands for an input in a signature: "%" for any operation, parameters and placeholders by name."""

    def __init__(self, node: fx.Node) -> None:
        self._text = str(node.target) if node.op in ("get_attr", "placeholder") else "%"

    def __repr__(self) -> str:
        return self._text


def aligned(trained: fx.Graph, evaluated: fx.Graph) -> tuple[fx.Graph, fx.Graph, list[Pair]]:
    """Both graphs, and pairs of operations with equal signatures, in the order of both."""
    trained_nodes, evaluated_nodes = operations(trained), operations(evaluated)
    signatures, others = list(map(signature, trained_nodes)), list(map(signature, evaluated_nodes))
    blocks = SequenceMatcher(None, signatures, others, autojunk=False).get_matching_blocks()
    pairs = [(trained_nodes[a + k], evaluated_nodes[b + k]) for a, b, size in blocks for k in range(size)]
    return trained, evaluated, pairs


def agreed(trained: fx.Graph, evaluated: fx.Graph, pairs: list[Pair]) -> list[Pair]:
    """The pairs without those that keep a gap from being one switch, with one value for each mode."""
    while True:
        gaps = Gaps(trained, evaluated, pairs)
        dropped = gaps.contradictions()
        if not dropped:
            return pairs
        pairs = [pair for index, pair in enumerate(pairs) if index not in dropped]


class Gaps:
    """The operations of one mode alone, by their gap between pairs: gap g is before pair g."""

    def __init__(self, trained: fx.Graph, evaluated: fx.Graph, pairs: Sequence[Pair]) -> None:
        self._sides = trained, evaluated
        self._pairs = pairs
        self._last = (trained.output_node(), evaluated.output_node())
        self.paired = {node: index for index, pair in enumerate(pairs) for node in pair}
        self.alone: dict[fx.Node, int] = {}  # the gap of each operation of one mode alone
        for graph in self._sides:
            gap = 0
            for node in operations(graph):
                gap = self.paired[node] + 1 if node in self.paired else gap
                if node not in self.paired:
                    self.alone[node] = gap

    def contradictions(self) -> set[int]:
        """Pairs to drop: operations of one mode, on either side of them, must run in the same switch."""
        dropped: set[int] = set()
        for node, gap in self.alone.items():
            for user in node.users:
                if user in self.alone:
                    dropped.update(range(gap, self.alone[user]))
        for pair, _ in self.differences():
            dropped.update(self._separating_pairs(pair))
        return dropped

    def differences(self) -> Iterator[tuple[Pair, int]]:
        """Each input of a pair that differs between the modes, and the index of that pair."""
        for index, (trained, evaluated) in enumerate(self.users()):
            for pair in zip(inputs_of(trained), inputs_of(evaluated), strict=True):
                if not self.same(pair):
                    yield pair, index

    def users(self) -> list[Pair]:
        return [*self._pairs, self._last]

    def same(self, pair: Pair) -> bool:
        """Whether two inputs have the same value in both modes."""
        ours, theirs = pair
        if ours in self.paired or theirs in self.paired:
            return self.paired.get(ours) == self.paired.get(theirs)
        return ours.op == theirs.op and ours.op in ("placeholder", "get_attr") and ours.target == theirs.target

    def gap(self, pair: Pair, user: int) -> int:
        """The gap whose switch gives a differing value: where one mode computes it, else just before its user."""
        return max((self.alone[node] for node in pair if node in self.alone), default=user)

    def _separating_pairs(self, pair: Pair) -> range:
        # The pairs between the operation of one mode that gives this value and the value of the other mode.
        available = [self.alone.get(node, self.paired.get(node, -1) + 1) for node in pair]
        computed = [self.alone[node] for node in pair if node in self.alone]
        return range(min(computed), max(available)) if computed else range(0)


class Merger:
    """Builds the merged graph."""

    def __init__(
        self, trained: fx.Graph, evaluated: fx.Graph, pairs: list[Pair], targets: dict[str, Any], training: bool
    ) -> None:
        self._sides = trained, evaluated
        self._gaps = Gaps(trained, evaluated, pairs)
        self._targets = targets
        self._training = training
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # merged node of a node of either graph
        self._switched: dict[Pair, fx.Node] = {}  # merged node of a switch's output

    def run(self) -> fx.Graph:
        """Build the merged graph, with its switches."""
        self._copy_inputs()
        alone: dict[int, tuple[list[fx.Node], list[fx.Node]]] = {}
        for side, graph in enumerate(self._sides):
            for node in operations(graph):
                if node in self._gaps.alone:
                    alone.setdefault(self._gaps.alone[node], ([], []))[side].append(node)
        outputs: dict[int, dict[Pair, None]] = {}
        for pair, user in self._gaps.differences():
            if not any(pair in pairs for pairs in outputs.values()):
                outputs.setdefault(self._gaps.gap(pair, user), {})[pair] = None
        for gap, (trained, evaluated) in enumerate(self._gaps.users()):
            if gap in alone or gap in outputs:
                self._switch(*alone.get(gap, ([], [])), list(outputs.get(gap, {})))
            self._append(trained, evaluated)
        return self._graph

    def _copy_inputs(self) -> None:
        # Placeholders and attributes, which both modes share.
        shared: dict[tuple[str, Any], fx.Node] = {}
        for graph in self._sides:
            for node in graph.nodes:
                if node.op in ("placeholder", "get_attr"):
                    key = node.op, node.target
                    if key not in shared:
                        shared[key] = self._graph.node_copy(node)
                    self._values[node] = shared[key]

    def _append(self, trained: fx.Node, evaluated: fx.Node) -> None:
        inputs = iter([self._value(pair) for pair in zip(inputs_of(trained), inputs_of(evaluated), strict=True)])
        args, kwargs = map_arg((trained.args, trained.kwargs), lambda _: next(inputs))
        if trained.op == "output":
            self._graph.output(*args)
            return
        merged = self._graph.create_node(trained.op, trained.target, args, kwargs, name=trained.name)
        merged.meta = copy.copy(trained.meta)
        self._values[trained] = self._values[evaluated] = merged

    def _value(self, pair: Pair) -> fx.Node:
        return self._values[pair[0]] if self._gaps.same(pair) else self._switched[pair]

    def _switch(self, trained: list[fx.Node], evaluated: list[fx.Node], outputs: list[Pair]) -> None:
        sources = [node for side in (trained, evaluated) for inner in side for node in inputs_of(inner)]
        sources += [node for pair in outputs for node in pair]
        inputs = list(dict.fromkeys(self._values[node] for node in sources if node not in self._gaps.alone))
        graphs = [
            self._branch(side, inputs, [pair[index] for pair in outputs])
            for index, side in enumerate((trained, evaluated))
        ]
        name = f"_switches.{sum(isinstance(value, Switch) for value in self._targets.values())}"
        modules = [GraphModule(nn.Module(), graph, class_name="Branch") for graph in graphs]
        self._targets[name] = Switch(*modules).train(self._training)
        switch = self._graph.create_node("call_module", name, tuple(inputs))
        switch.meta = copy.copy([*reversed(trained), *evaluated, *(node for pair in outputs for node in pair)][0].meta)
        if len(outputs) == 1:
            self._switched[outputs[0]] = switch
            return
        for index, pair in enumerate(outputs):
            self._switched[pair] = self._graph.call_function(operator.getitem, (switch, index))

    def _branch(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], output_nodes: Sequence[fx.Node]) -> fx.Graph:
        graph = fx.Graph()
        placeholders: Mapping[fx.Node, fx.Node] = {
            node: graph.placeholder(f"given_{i}") for i, node in enumerate(inputs)
        }
        copies: dict[fx.Node, fx.Node] = {}

        def value(node: fx.Node) -> fx.Node:
            return copies[node] if node in copies else placeholders[self._values[node]]

        for node in nodes:
            copies[node] = graph.node_copy(node, value)
        outputs = tuple(value(node) for node in output_nodes)
        graph.output(outputs[0] if len(outputs) == 1 else outputs)
        return graph
