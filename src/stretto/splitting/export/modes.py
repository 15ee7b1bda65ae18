"""A forward recorded in training and in evaluation, as one graph: where the two differ, a switch.

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

Pair = tuple[fx.Node, fx.Node]  # what training gives, what evaluation gives


class Switch(nn.Module):
    """One graph while it trains, another one in evaluation."""

    def __init__(self, trained: fx.GraphModule, evaluated: fx.GraphModule) -> None:
        super().__init__()
        self.trained = trained
        self.evaluated = evaluated

    def forward(self, *inputs: Any) -> Any:
        """What the mode's graph gives."""
        return (self.trained if self.training else self.evaluated)(*inputs)


def merge(trained: fx.Graph, evaluated: fx.Graph, targets: dict[str, Any], *, training: bool) -> fx.Graph:
    """The graph of both. Switches are added to `targets`, in the mode `training`."""
    pairs = agreed(*aligned(trained, evaluated))
    merger = Merger(trained, evaluated, pairs, targets, training)
    return merger.run()


def operations(graph: fx.Graph) -> list[fx.Node]:
    """What a graph computes."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, as often as they are there."""
    found: list[fx.Node] = []

    def note(used: fx.Node) -> fx.Node:
        found.append(used)
        return used

    map_arg((node.args, node.kwargs), note)
    return found


def path_of(node: fx.Node) -> str:
    """The module in which an operation was recorded; "" is the model."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]).partition(".")[2] if stack else ""


def likeness(node: fx.Node) -> str:
    """What makes two operations the same, but for where their inputs come from."""
    place: Any = AnyInput
    return f"{path_of(node)} {node.target} {map_arg((node.args, node.kwargs), place)}"


class AnyInput:
    """Stands for an input in a likeness; parameters are told apart."""

    def __init__(self, node: fx.Node) -> None:
        self._text = str(node.target) if node.op in ("get_attr", "placeholder") else "%"

    def __repr__(self) -> str:
        return self._text


def aligned(trained: fx.Graph, evaluated: fx.Graph) -> tuple[fx.Graph, fx.Graph, list[Pair]]:
    """The operations that both have, in the order that both have them in."""
    ours, theirs = operations(trained), operations(evaluated)
    matcher = SequenceMatcher(None, list(map(likeness, ours)), list(map(likeness, theirs)), autojunk=False)
    blocks = matcher.get_matching_blocks()
    return trained, evaluated, [(ours[a + k], theirs[b + k]) for a, b, size in blocks for k in range(size)]


def agreed(trained: fx.Graph, evaluated: fx.Graph, pairs: list[Pair]) -> list[Pair]:
    """Those pairs between which everything can be a switch: what flows out of one has a value in either mode."""
    while True:
        gaps = Gaps(trained, evaluated, pairs)
        dropped = gaps.contradictions()
        if not dropped:
            return pairs
        pairs = [pair for index, pair in enumerate(pairs) if index not in dropped]


class Gaps:
    """Where operations stand between the pairs: gap g is before pair g."""

    def __init__(self, trained: fx.Graph, evaluated: fx.Graph, pairs: Sequence[Pair]) -> None:
        self._sides = trained, evaluated
        self._pairs = pairs
        self._last = (trained.output_node(), evaluated.output_node())
        self.paired = {node: index for index, pair in enumerate(pairs) for node in pair}
        self.alone: dict[fx.Node, int] = {}  # the gap of what only one mode computes
        for graph in self._sides:
            gap = 0
            for node in operations(graph):
                gap = self.paired[node] + 1 if node in self.paired else gap
                if node not in self.paired:
                    self.alone[node] = gap

    def contradictions(self) -> set[int]:
        """Pairs that must not be, for what stands on either side of them belongs together."""
        dropped: set[int] = set()
        for node, gap in self.alone.items():
            for user in node.users:
                if user in self.alone:
                    dropped.update(range(gap, self.alone[user]))
        for pair, _ in self.differences():
            dropped.update(self._hindrance(pair))
        return dropped

    def differences(self) -> Iterator[tuple[Pair, int]]:
        """What a pair is given that is not the same in both modes, and the number of the pair."""
        for index, (ours, theirs) in enumerate(self.users()):
            for pair in zip(inputs_of(ours), inputs_of(theirs), strict=True):
                if not self.same(pair):
                    yield pair, index

    def users(self) -> list[Pair]:
        """The pairs, and the outputs."""
        return [*self._pairs, self._last]

    def same(self, pair: Pair) -> bool:
        """Whether two inputs are one and the same value."""
        ours, theirs = pair
        if ours in self.paired or theirs in self.paired:
            return self.paired.get(ours) == self.paired.get(theirs)
        return ours.op == theirs.op and ours.op in ("placeholder", "get_attr") and ours.target == theirs.target

    def gap(self, pair: Pair, user: int) -> int:
        """The gap in which a value that differs is settled: where it is made, or used, if both modes have both."""
        return max((self.alone[node] for node in pair if node in self.alone), default=user)

    def _hindrance(self, pair: Pair) -> range:
        # From where one of the two is made, by one mode alone, to where the other one is there.
        there = [self.alone.get(node, self.paired.get(node, -1) + 1) for node in pair]
        made = [self.alone[node] for node in pair if node in self.alone]
        return range(min(made), max(there)) if made else range(0)


class Merger:
    """Builds the graph of both modes."""

    def __init__(
        self, trained: fx.Graph, evaluated: fx.Graph, pairs: list[Pair], targets: dict[str, Any], training: bool
    ) -> None:
        self._sides = trained, evaluated
        self._gaps = Gaps(trained, evaluated, pairs)
        self._targets = targets
        self._training = training
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # of either side
        self._settled: dict[Pair, fx.Node] = {}  # what a switch gave

    def run(self) -> fx.Graph:
        """Build the graph of both modes, with its switches."""
        self._share()
        alone: dict[int, tuple[list[fx.Node], list[fx.Node]]] = {}
        for side, graph in enumerate(self._sides):
            for node in operations(graph):
                if node in self._gaps.alone:
                    alone.setdefault(self._gaps.alone[node], ([], []))[side].append(node)
        wanted: dict[int, dict[Pair, None]] = {}
        for pair, user in self._gaps.differences():
            if not any(pair in others for others in wanted.values()):
                wanted.setdefault(self._gaps.gap(pair, user), {})[pair] = None
        for gap, (ours, theirs) in enumerate(self._gaps.users()):
            if gap in alone or gap in wanted:
                self._switch(*alone.get(gap, ([], [])), list(wanted.get(gap, {})))
            self._append(ours, theirs)
        return self._graph

    def _share(self) -> None:
        # What both modes are given.
        shared: dict[tuple[str, Any], fx.Node] = {}
        for graph in self._sides:
            for node in graph.nodes:
                if node.op in ("placeholder", "get_attr"):
                    key = node.op, node.target
                    if key not in shared:
                        shared[key] = self._graph.node_copy(node)
                    self._values[node] = shared[key]

    def _append(self, ours: fx.Node, theirs: fx.Node) -> None:
        given = iter([self._value(pair) for pair in zip(inputs_of(ours), inputs_of(theirs), strict=True)])
        args, kwargs = map_arg((ours.args, ours.kwargs), lambda _: next(given))
        if ours.op == "output":
            self._graph.output(*args)
            return
        made = self._graph.create_node(ours.op, ours.target, args, kwargs, name=ours.name)
        made.meta = copy.copy(ours.meta)
        self._values[ours] = self._values[theirs] = made

    def _value(self, pair: Pair) -> fx.Node:
        return self._values[pair[0]] if self._gaps.same(pair) else self._settled[pair]

    def _switch(self, ours: list[fx.Node], theirs: list[fx.Node], wanted: list[Pair]) -> None:
        outer = [node for side in (ours, theirs) for each in side for node in inputs_of(each)]
        outer += [node for pair in wanted for node in pair]
        given = list(dict.fromkeys(self._values[node] for node in outer if node not in self._gaps.alone))
        graphs = [
            self._branch(side, given, [pair[index] for pair in wanted]) for index, side in enumerate((ours, theirs))
        ]
        name = f"_switches.{sum(isinstance(value, Switch) for value in self._targets.values())}"
        modules = [fx.GraphModule(nn.Module(), graph, class_name="Branch") for graph in graphs]
        self._targets[name] = Switch(*modules).train(self._training)
        made = self._graph.create_node("call_module", name, tuple(given))
        made.meta = copy.copy([*reversed(ours), *theirs, *(node for pair in wanted for node in pair)][0].meta)
        if len(wanted) == 1:
            self._settled[wanted[0]] = made
            return
        for index, pair in enumerate(wanted):
            self._settled[pair] = self._graph.call_function(operator.getitem, (made, index))

    def _branch(self, nodes: Sequence[fx.Node], given: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> fx.Graph:
        graph = fx.Graph()
        inside: Mapping[fx.Node, fx.Node] = {node: graph.placeholder(f"given_{i}") for i, node in enumerate(given)}
        made: dict[fx.Node, fx.Node] = {}

        def value(node: fx.Node) -> fx.Node:
            return made[node] if node in made else inside[self._values[node]]

        for node in nodes:
            made[node] = graph.node_copy(node, value)
        outputs = tuple(value(node) for node in wanted)
        graph.output(outputs[0] if len(outputs) == 1 else outputs)
        return graph
