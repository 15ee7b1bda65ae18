"""A model with a list of blocks in it, cut between the blocks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from stretto.errors import UsageError
from stretto.splitting.arguments import count_inputs
from stretto.splitting.assembly import assemble
from stretto.splitting.carry import Form, Kind, Watch, guess_forms, leaves, num_leaves, rebuild
from stretto.splitting.cost import Inputs
from stretto.splitting.parts import Joint, Parts, tally, tied
from stretto.splitting.recording import record
from stretto.splitting.undisturbed import home, undisturbed


class Blocks(Parts):
    """The traced forward of a model, in as many units as there are blocks.

    What comes before the first block belongs to the first unit, everything else to the unit of the block before it:

        wte  wpe  add  h.0  |  h.1  |  h.2  norm  head
        ------ unit 0 ------   unit 1  ---- unit 2 ----

    A value that a later unit needs travels through the stages between, behind what the last block gave. Weights,
    buffers and constants do not travel, nor do shapes and numbers: each stage takes or computes its own.
    """

    noun = "block"

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Inputs | None, *, together: bool
    ) -> None:
        self._model = model
        self._blocks = dict(blocks)
        num_inputs = count_inputs(model, None if inputs is None else len(inputs))
        self._graph, self._targets = record(model, blocks, num_inputs)
        self._persistent = set(model.state_dict())
        self._units = self._number()
        self._forms = guess_forms(self._graph) if inputs is None else self._watch(inputs)
        self._last_use = self._uses()
        names = [self.name(index, index + 1) for index in range(len(self))]
        stuck = {i: joint for i in range(1, len(self)) if (joint := self._obstacle(i, names)) is not None}
        shared = tied(self._parameters(), names) if together else {}
        self.joints = dict(sorted({**stuck, **shared}.items()))

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def cut(self, bounds: Sequence[int]) -> list[nn.Module]:
        """Each stage a GraphModule on the model's own modules, parameters and buffers, under their own names."""
        kind = type(self._model).__name__
        return [
            assemble(self._stage(start, stop), self._targets, self._persistent, self._model, f"{kind}Stage{index}")
            for index, (start, stop) in enumerate(pairwise(bounds))
        ]

    def name(self, start: int, stop: int) -> str:
        """The blocks start up to stop."""
        names = list(self._blocks)
        if stop == start + 1:
            around = " with what comes before it" * (start == 0) + " with what comes after it" * (stop == len(self))
            return f"block {names[start]} ({type(self._blocks[names[start]]).__name__}){around}"
        return f"blocks {names[start]} to {names[stop - 1]}"

    def kinds(self, start: int, stop: int) -> str:
        """The classes of the modules called, the blocks and those around them."""
        called = (node.target for node in self._graph.nodes if node.op == "call_module" and self._in(node, start, stop))
        return tally(self._targets[target] for target in called)

    def notes(self, bounds: Sequence[int]) -> list[str]:
        """What travels besides the last block's output, and what had to stay together."""
        carried = []
        for index, position in enumerate(bounds[1:-1]):
            live = self._live(position)
            if sum(num_leaves(self._forms[node]) for node in live) > 1:
                names = ", ".join(node.name for node in live)
                carried.append(f"carried from stage {index} to stage {index + 1}: {names}")
        return carried + super().notes(bounds)

    # -- the graph --------------------------------------------------------------------------------------------------

    def _number(self) -> dict[fx.Node, int]:
        # Which unit each node belongs to; refuses blocks that are not called once each in order.
        units: dict[fx.Node, int] = {}
        called: list[str] = []
        for node in self._graph.nodes:
            if node.op == "call_module" and node.target in self._blocks:
                called.append(node.target)
            units[node] = max(len(called) - 1, 0)
        if called != list(self._blocks):
            missing = [name for name in self._blocks if name not in called]
            twice = [name for name in self._blocks if called.count(name) > 1]
            what = (
                f"{', '.join(twice[:4])} called more than once"
                if twice
                else f"{', '.join(missing[:4])} not called"
                if missing
                else f"called in the order {', '.join(called[:8])}"
            )
            raise UsageError(
                f"the blocks of {type(self._model).__name__} must be called one after the other, once each, for the "
                f"model to be cut between them: {what}. Name another list of blocks, or give a list of layers"
            )
        return units

    def _watch(self, inputs: Inputs) -> dict[fx.Node, Form]:
        # Run the example once and see what every node gives.
        module = assemble(self._graph, self._targets, self._persistent, self._model, "Whole")
        watch = Watch(module)
        with undisturbed([self._model, module], home([module])), torch.no_grad():
            watch.run(*inputs)
        return watch.forms

    def _own(self, node: fx.Node) -> bool:
        # Whether each stage takes or computes this node for itself.
        return node.op == "get_attr" or (
            self._forms[node] is Kind.PLAIN and node.op in ("call_function", "call_method") and bool(node.users)
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

    def _uses(self) -> dict[fx.Node, int]:
        # The last unit that needs what a node gives.
        last: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if not self._own(node):
                for source in self._sources(node):
                    last[source] = max(last.get(source, 0), self._units[node])
        return last

    def _live(self, position: int) -> list[fx.Node]:
        # What travels from unit position - 1 to unit position: first what that block gave, the rest in order.
        live = [
            node
            for node in self._graph.nodes
            if self._units[node] < position <= self._last_use.get(node, -1) and not self._own(node)
        ]
        since = self._block(position - 1)
        newest = next((node for node in live if node in since), None)
        return live if newest is None else [newest, *(node for node in live if node is not newest)]

    def _block(self, unit: int) -> set[fx.Node]:
        # The unit's block and what comes after it.
        nodes = [node for node in self._graph.nodes if self._units[node] == unit]
        calls = [i for i, node in enumerate(nodes) if node.op == "call_module" and node.target in self._blocks]
        return set(nodes[calls[0] :])

    def _obstacle(self, position: int, names: Sequence[str]) -> Joint | None:
        # Why there can be no cut before this unit.
        live = self._live(position)
        for node in live:
            if self._forms[node] in (Kind.STUCK, Kind.PLAIN):
                return Joint(
                    f"{names[position - 1]} and {names[position]} pass {node.name!r} on, which is neither a tensor nor "
                    "a tuple or list of tensors",
                    "pass tensors from block to block",
                )
        if not sum(num_leaves(self._forms[node]) for node in live):
            return Joint(f"nothing passes from {names[position - 1]} to {names[position]}", "use what the block gives")
        return None

    def _parameters(self) -> list[dict[str, nn.Parameter]]:
        # What each unit uses, by name.
        owned: list[dict[str, nn.Parameter]] = [{} for _ in self._blocks]
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
            values[node] = rebuild(graph, self._forms[node], node.name)
        for node in self._graph.nodes:
            if node.op != "output" and self._in(node, start, stop) and not self._own(node):
                values[node] = graph.node_copy(node, value)
        if stop == len(self):
            graph.output(map_arg(self._graph.output_node().args[0], value))
            return graph
        given = [leaf for node in self._live(stop) for leaf in leaves(graph, values[node], self._forms[node])]
        graph.output(given[0] if len(given) == 1 else tuple(given))
        return graph
