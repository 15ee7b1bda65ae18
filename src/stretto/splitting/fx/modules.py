"""Any model that torch.fx can follow, cut between the modules that its forward calls."""

from collections.abc import Sequence
from functools import cached_property

from torch import fx, nn

from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import find_call
from stretto.splitting.fx.graph import TraceError, record
from stretto.splitting.fx.module_units import Units
from stretto.splitting.lists import entries, lookup, opens, outer
from stretto.splitting.operations import held_together
from stretto.splitting.parts import Joint, tied


class Modules(Units):
    """The traced forward of a model, in as many units as it calls modules.

    Lists of blocks, and plain sequences in them, are looked into wherever they are; any other module is one unit:

        stem  |  layer1.0  |  layer1.1  |  layer2.0  |  pool  |  fc
        unit 0   - unit 1 -   - unit 2 -   - unit 3 -   unit 4   unit 5

    Nothing is parted that is worked on in place, nor what lies between two calls of one module.
    """

    noun = "module"

    def __init__(self, model: nn.Module, inputs: Inputs, names: Sequence[str] | None, *, together: bool) -> None:
        call = find_call(model, len(inputs), names)
        super().__init__(model, call, record(model, leaves_of(model), call, inputs), inputs)
        if not self._calls:
            raise TraceError(f"{type(model).__name__}.forward calls no module: there is nothing to cut between")
        called = [self.name(index, index + 1) for index in range(len(self))]
        stuck = {i: joint for i in range(1, len(self)) if (joint := self._obstacle(i, called)) is not None}
        shared = tied(self._parameters(), called) if together else {}
        self.joints = dict(sorted({**self._in_place(called), **self._called_again(called), **stuck, **shared}.items()))

    def __len__(self) -> int:
        """Number of calls."""
        return len(self._calls)

    def name(self, start: int, stop: int) -> str:
        """The modules start up to stop."""
        first, last = (str(self._calls[index].target) for index in (start, stop - 1))
        if stop == start + 1:
            return f"module {first} ({type(self._targets[first]).__name__})"
        return f"modules {first} to {last}"

    def divisible(self, index: int) -> bool:
        """Whether a module has others in it."""
        return any(True for _ in self._targets[str(self._calls[index].target)].children())

    def verify(self, stages: Sequence[nn.Module]) -> None:
        """Compare with the model in evaluation and in training."""
        super().verify(stages)
        assert self._inputs is not None
        modes = {module: True for stage in stages for module in stage.modules()}
        modes |= {module: module.training or not self._model.training for module in self._model.modules()}
        self._compare(stages, self._inputs, modes)

    @cached_property
    def _calls(self) -> list[fx.Node]:
        return [node for node in self._graph.nodes if self._begins(node)]

    def _begins(self, node: fx.Node) -> bool:
        return node.op == "call_module"

    def _in_place(self, names: Sequence[str]) -> dict[int, Joint]:
        order = [node for node in self._graph.nodes if self._computes(node)]
        barred = held_together(order, list(self._look()))
        places = {node: position for position, node in enumerate(order)}
        return {
            index: Joint(f"{names[index - 1]} and {names[index]} share what changes in place", "use inplace=False")
            for index, call in enumerate(self._calls)
            if index and places[call] in barred
        }

    def _called_again(self, names: Sequence[str]) -> dict[int, Joint]:
        seen: dict[int, int] = {}
        joints: dict[int, Joint] = {}
        for index, call in enumerate(self._calls):
            first = seen.setdefault(id(self._targets[str(call.target)]), index)
            joint = Joint(f"{names[first]} is called more than once", "give each call a module of its own")
            joints |= dict.fromkeys(range(first + 1, index + 1), joint)
        return joints


def leaves_of(model: nn.Module) -> dict[str, nn.Module]:
    """What is not looked into: the modules of every list that is in no other, by their dotted names.

    A plain sequence among them is looked into, too: its members are here in its place.
    """
    found: dict[str, nn.Module] = {}
    lists = {path: entries(lookup(model, path), repr(path)) for path in outer(model)}
    pending = [(f"{path}.{name}", entry) for path, members in lists.items() for name, entry in members]
    while pending:
        name, module = pending.pop(0)
        if opens(module):
            pending += [(f"{name}.{inner}", member) for inner, member in module.named_children()]
        else:
            found[name] = module
    return found
