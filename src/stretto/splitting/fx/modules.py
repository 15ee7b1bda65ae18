"""Any model that torch.fx can follow, cut between the modules that its forward calls."""

from collections.abc import Sequence
from functools import cached_property

from torch import fx, nn

from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import find_call
from stretto.splitting.fx.graph import TraceError, record
from stretto.splitting.fx.module_units import Units
from stretto.splitting.graph_operations import held_together
from stretto.splitting.lists import entries, lookup, opens, outer
from stretto.splitting.parts import Joint, tied


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
        """The number of calls."""
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
