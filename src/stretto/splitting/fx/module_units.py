"""A model's forward traced by torch.fx, cut where it calls modules."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import fx

from stretto.splitting.boundary_values import num_leaves
from stretto.splitting.fx.graph import REMEDY
from stretto.splitting.fx.traced import Traced
from stretto.splitting.parts import tally


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
