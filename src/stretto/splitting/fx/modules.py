"""Any model that torch.fx can follow, cut between the modules that its forward calls.

`Blocks` are those of a model that calls a list of blocks, cut between the blocks.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import fx, nn

from stretto.splitting.boundary_values import num_leaves
from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import find_call
from stretto.splitting.fx.graph import REMEDY, TraceError, record
from stretto.splitting.fx.traced import Traced
from stretto.splitting.graph_operations import held_together
from stretto.splitting.layer_lists import entries, lookup, opens, outer
from stretto.splitting.parts import Joint, tally, tied


class Units(Traced):
    """The traced forward in units: each begins with the call of a module and ends before the next such call.

    Nodes before the first call belong to the first unit. Of the values sent to the next stage, the last module's output
    comes first.
    """

    def kinds(self, start: int, stop: int) -> str:
        """The classes of the modules that the units from `start` up to `stop` call."""
        called = (
            node.target for node in self._graph.nodes if node.op == "call_module" and self._in_units(node, start, stop)
        )
        return tally(self._targets[str(target)] for target in called)

    def notes(self, bounds: Sequence[int]) -> list[str]:
        """The values sent besides the last unit's output, and the units that had to stay together."""
        carried = []
        for index, position in enumerate(bounds[1:-1]):
            live = self._sent_whole(position)
            if sum(num_leaves(self._forms[node]) for node in live) > 1:
                names = ", ".join(node.name for node in live)
                carried.append(f"carried from stage {index} to stage {index + 1}: {names}")
        outputs = [f"output: {', '.join(self._outputs)}"] if self._outputs else []
        return carried + outputs + super().notes(bounds)

    @abstractmethod
    def _begins(self, node: fx.Node) -> bool:
        """Whether a unit begins with this node."""

    def why_different(self) -> str:
        """A decision that tracing changes."""
        return (
            f"between its {self.noun}s, its forward decides by something that tracing changes, such as "
            f"isinstance(x, torch.Tensor). {REMEDY}"
        )

    def _number(self) -> dict[fx.Node, int]:
        units: dict[fx.Node, int] = {}
        num_begun = 0
        for node in self._graph.nodes:
            num_begun += self._begins(node)
            units[node] = max(num_begun - 1, 0)
        return units

    def _first(self, position: int, live: Sequence[fx.Node]) -> fx.Node | None:
        # The first live value computed from the call of the last unit's module on.
        nodes = self._members[position - 1]
        calls = [index for index, node in enumerate(nodes) if self._begins(node)]
        from_call = set(nodes[calls[0] :])
        return next((node for node in live if node in from_call), None)


class Modules(Units):
    """The traced forward of a model, in as many units as it calls modules.

    The modules of lists of blocks, and of plain nn.Sequentials in them, are units; so is any other module called:

        stem  |  layer1.0  |  layer1.1  |  layer2.0  |  pool  |  fc
        unit 0   - unit 1 -   - unit 2 -   - unit 3 -   unit 4   unit 5

    No cut separates operations on a tensor that is changed in place, or falls between two calls of one module.
    """

    noun = "module"

    def __init__(self, model: nn.Module, inputs: Inputs, names: Sequence[str] | None, *, together: bool) -> None:
        call = find_call(model, len(inputs), names)
        super().__init__(model, call, record(model, leaves_of(model), call, inputs), inputs)
        if not self._calls:
            raise TraceError(f"{type(model).__name__}.forward calls no module: there is nothing to cut between")
        unit_names = [self.name(index, index + 1) for index in range(len(self))]
        uncuttable = {i: joint for i in range(1, len(self)) if (joint := self._obstacle(i, unit_names)) is not None}
        sharing = tied(self._parameters(), unit_names) if together else {}
        self.joints = dict(
            sorted({**self._in_place(unit_names), **self._called_again(unit_names), **uncuttable, **sharing}.items())
        )

    def __len__(self) -> int:
        return len(self._calls)

    def name(self, start: int, stop: int) -> str:
        """The modules from `start` up to `stop`, for messages."""
        first, last = (str(self._calls[index].target) for index in (start, stop - 1))
        if stop == start + 1:
            return f"module {first} ({type(self._targets[first]).__name__})"
        return f"modules {first} to {last}"

    def divisible(self, index: int) -> bool:
        """Whether a module has submodules."""
        return any(True for _ in self._targets[str(self._calls[index].target)].children())

    @cached_property
    def _calls(self) -> list[fx.Node]:
        return [node for node in self._graph.nodes if self._begins(node)]

    def _begins(self, node: fx.Node) -> bool:
        return node.op == "call_module"

    def _in_place(self, names: Sequence[str]) -> dict[int, Joint]:
        order = [node for node in self._graph.nodes if self._computes(node)]
        barred = held_together(order, list(self._record_operations()))
        positions = {node: position for position, node in enumerate(order)}
        return {
            index: Joint(
                f"{names[index - 1]} and {names[index]} share a tensor or buffer that changes in place",
                "use inplace=False",
            )
            for index, call in enumerate(self._calls)
            if index and positions[call] in barred
        }

    def _called_again(self, names: Sequence[str]) -> dict[int, Joint]:
        first_call: dict[int, int] = {}
        joints: dict[int, Joint] = {}
        for index, call in enumerate(self._calls):
            first = first_call.setdefault(id(self._targets[str(call.target)]), index)
            joint = Joint(f"{names[first]} is called more than once", "give each call a module of its own")
            joints |= dict.fromkeys(range(first + 1, index + 1), joint)
        return joints


def leaves_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are traced as one node each: those of every outermost list, by their dotted paths.

    A plain nn.Sequential among them is replaced by its own modules.
    """
    leaf_modules: dict[str, nn.Module] = {}
    lists = {path: entries(lookup(model, path), repr(path)) for path in outer(model)}
    pending = [(f"{path}.{name}", entry) for path, members in lists.items() for name, entry in members]
    while pending:
        name, module = pending.pop(0)
        if opens(module):
            pending += [(f"{name}.{child_name}", child) for child_name, child in module.named_children()]
        else:
            leaf_modules[name] = module
    return leaf_modules


class Blocks(Units):
    """The traced forward of a model, one unit for each block.

    Nodes before the first block belong to the first unit, every other node to the unit of the block before it:

        wte  wpe  add  h.0  |  h.1  |  h.2  norm  head
        ------ unit 0 ------   unit 1  ---- unit 2 ----

    Of the values sent to the next stage, the last block's output comes first.
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
        self._blocks = dict(blocks)
        call = find_call(model, None if inputs is None else len(inputs), names)
        recorded = record(model, blocks, call, inputs)
        check_calls(model, list(blocks), recorded.graph)
        super().__init__(model, call, recorded, inputs)
        names = [self.name(index, index + 1) for index in range(len(self))]
        uncuttable = {i: joint for i in range(1, len(self)) if (joint := self._obstacle(i, names)) is not None}
        sharing = tied(self._parameters(), names) if together else {}
        self.joints = dict(sorted({**uncuttable, **sharing}.items()))

    def __len__(self) -> int:
        return len(self._blocks)

    def name(self, start: int, stop: int) -> str:
        """The blocks from `start` up to `stop`, for messages."""
        names = list(self._blocks)
        if stop == start + 1:
            around = " with what comes before it" * (start == 0) + " with what comes after it" * (stop == len(self))
            return f"block {names[start]} ({type(self._blocks[names[start]]).__name__}){around}"
        return f"blocks {names[start]} to {names[stop - 1]}"

    def divisible(self, index: int) -> bool:
        """Whether a block has submodules, or shares its unit with nodes before or after the blocks."""
        block = list(self._blocks.values())[index]
        return index in (0, len(self) - 1) or any(True for _ in block.children())

    def _begins(self, node: fx.Node) -> bool:
        return node.op == "call_module" and node.target in self._blocks


def check_calls(model: nn.Module, blocks: Sequence[str], graph: fx.Graph) -> None:
    """Raise TraceError unless the forward calls each block once, in order."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_module" and node.target in blocks]
    if called == list(blocks):
        return
    missing = [name for name in blocks if name not in called]
    repeated = [name for name in blocks if called.count(name) > 1]
    problem = (
        f"{', '.join(repeated[:4])} called more than once"
        if repeated
        else f"{', '.join(missing[:4])} not called"
        if missing
        else f"called in the order {', '.join(called[:8])}"
    )
    raise TraceError(
        f"the blocks of {type(model).__name__} must be called one after the other, once each, for the model to be cut "
        f"between them: {problem}. Name another list of blocks, or give a list of layers"
    )
