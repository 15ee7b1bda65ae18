"""A model with a list of blocks in it, cut between the blocks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from stretto.chain import Chain
from stretto.errors import UsageError
from stretto.splitting.arguments import find_call
from stretto.splitting.assembly import assemble
from stretto.splitting.carry import Form, Kind, Watch, guess_forms, leaves, num_leaves, outline, pack, rebuild, stand_in
from stretto.splitting.cost import Inputs
from stretto.splitting.decisions import asks
from stretto.splitting.parts import Joint, Parts, tally, tied
from stretto.splitting.recording import REMEDY, record
from stretto.splitting.undisturbed import home, members, trainable, undisturbed


class Blocks(Parts):
    """The traced forward of a model, in as many units as there are blocks.

    What comes before the first block belongs to the first unit, everything else to the unit of the block before it:

        wte  wpe  add  h.0  |  h.1  |  h.2  norm  head
        ------ unit 0 ------   unit 1  ---- unit 2 ----

    A value that a later unit needs travels through the stages between, behind what the last block gave; of a tensor
    whose shape alone is needed, its outline. Weights, buffers and constants do not travel, nor do shapes and numbers:
    each stage takes or computes its own.
    """

    noun = "block"

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        inputs: Inputs | None,
        names: Sequence[str] | None = None,
        *,
        together: bool,
    ) -> None:
        self._model = model
        self._blocks = dict(blocks)
        self._inputs = inputs
        self._call = find_call(model, None if inputs is None else len(inputs), names)
        self._graph, self._targets, self._outputs = record(model, blocks, self._call, inputs)
        self._persistent = set(model.state_dict())
        self._units = self._number()
        self._forms = guess_forms(self._graph) if inputs is None else self._watch(inputs)
        self._last_use, self._last_read = self._uses()
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
            live = [node for node in self._live(position) if not self._outlined(node, position)]
            if sum(num_leaves(self._forms[node]) for node in live) > 1:
                names = ", ".join(node.name for node in live)
                carried.append(f"carried from stage {index} to stage {index + 1}: {names}")
        given = [f"output: {', '.join(self._outputs)}"] if self._outputs else []
        return carried + given + super().notes(bounds)

    def verify(self, stages: Sequence[nn.Module]) -> None:
        """Run the example through the model and through the stages. Raises UsageError if they differ."""
        if self._inputs is None:
            return
        with undisturbed([self._model, *stages], home([self._model])), torch.no_grad():
            torch.manual_seed(0)  # for what draws in evaluation, too
            wanted = tensors_of(self._call.run(self._model, self._inputs))
            torch.manual_seed(0)
            found = tensors_of(Chain(*stages)(*self._inputs))
        if len(wanted) < len(found) or not all(map(close, wanted, found)):
            kind = type(self._model).__name__
            raise UsageError(
                f"the stages of {kind} do not give what the model gives for the example: between its blocks, its "
                f"forward decides by something that tracing changes, such as isinstance(x, torch.Tensor). {REMEDY}"
            )

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
        watch = Watch(module, self._call.hint)
        with undisturbed([self._model, module], home([module])), trainable(self._model):
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
        return self._forms[node] in (Kind.TENSOR, Kind.FIXED) and self._last_read.get(node, -1) < position

    def _live(self, position: int) -> list[fx.Node]:
        # What travels from unit position - 1 to unit position: first what that block gave, the rest in order, but
        # last what may be None.
        live = [
            node
            for node in self._graph.nodes
            if self._units[node] < position <= self._last_use.get(node, -1) and not self._own(node)
        ]
        since = self._block(position - 1)
        newest = next((node for node in live if node in since), None)
        ordered = live if newest is None else [newest, *(node for node in live if node is not newest)]
        return sorted(ordered, key=lambda node: self._forms[node] is Kind.OPTIONAL)

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
        certain = [n for n in live if self._forms[n] is not Kind.OPTIONAL and not self._outlined(n, position)]
        if not sum(num_leaves(self._forms[node]) for node in certain):
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
            if self._outlined(node, start):
                values[node] = graph.call_function(stand_in, (graph.placeholder(node.name),))
            else:
                values[node] = rebuild(graph, self._forms[node], node.name)
        for node in self._graph.nodes:
            if node.op != "output" and self._in(node, start, stop) and not self._own(node):
                values[node] = graph.node_copy(node, value)
        if stop == len(self):
            graph.output(map_arg(self._graph.output_node().args[0], value))
            return graph
        given: list[fx.Node] = []
        for node in self._live(stop):
            if self._outlined(node, stop):
                given.append(graph.call_function(outline, (values[node],)))
            elif self._forms[node] is Kind.OPTIONAL:
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
