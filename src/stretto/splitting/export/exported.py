"""Any model, cut where the least has to travel: the last resort, by torch.export."""

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import fx, nn

from stretto.splitting.balance import cheapest
from stretto.splitting.boundary_values import ValueKind, num_leaves
from stretto.splitting.cost import Inputs
from stretto.splitting.export.exported_program import REMEDY, export
from stretto.splitting.export.modes import path_of
from stretto.splitting.forward_arguments import find_call
from stretto.splitting.fx.traced import Traced
from stretto.splitting.operations import OperationRecorder, held_together
from stretto.splitting.parts import tally, tied


class Exported(Traced):
    """The exported forward of a model, in pieces of one costly operation each.

    Costly are operations with FLOPs that torch counts, and those that read a weight matrix. Between two of them any
    cut balances alike, so the pieces meet where the fewest bytes pass, as late as may be:

        conv2d  batch_norm  relu_  |  conv2d  add  relu  |  mean  linear
        --------- piece 0 --------   ----- piece 1 -----   -- piece 2 --

    Nothing is parted that shares a buffer which changes, or a tensor that is worked on in place.
    What was computed last travels before everything else.
    """

    noun = "piece"

    def __init__(
        self, model: nn.Module, inputs: Inputs, names: Sequence[str] | None, because: str, *, together: bool
    ) -> None:
        call = find_call(model, len(inputs), names)
        inputs = several_rows(inputs)
        self._because = because
        super().__init__(model, call, export(model, call, inputs), inputs)
        names = [self.name(index, index + 1) for index in range(len(self))]
        self.joints = tied(self._parameters(), names) if together else {}

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self._starts)

    def name(self, start: int, stop: int) -> str:
        """The pieces start up to stop, and the modules in which their costly operations are."""
        first, last = (self._costly[index] for index in (start, stop - 1))
        where = path_of(first) or first.name
        if stop == start + 1:
            return f"piece {start} ({where})"
        return f"pieces {start} to {stop - 1} ({where} to {path_of(last) or last.name})"

    def kinds(self, start: int, stop: int) -> str:
        """The classes of the modules whose forwards they are."""
        paths = dict.fromkeys(path_of(node) for node in self._graph.nodes if self._in(node, start, stop))
        modules = dict(self._model.named_modules())
        return tally(modules[path] for path in paths if path in modules and not list(modules[path].children()))

    def notes(self, bounds: Sequence[int]) -> list[str]:
        """Why it was exported, what travels, and what had to stay together."""
        sent = []
        for index, position in enumerate(bounds[1:-1]):
            names = ", ".join(node.name for node in self._travels(position))
            sent.append(f"sent from stage {index} to stage {index + 1}: {self._bytes[position]:,} bytes ({names})")
        outputs = [f"output: {', '.join(self._outputs)}"] if self._outputs else []
        return [f"cut by torch.export: {self._because}", *sent, *outputs, *super().notes(bounds)]

    def divisible(self, index: int) -> bool:
        """No piece is: each is one costly operation, or what cannot be parted."""
        return False

    def choose(self, costs: Sequence[int], units: Sequence[int], num_stages: int) -> list[int]:
        """Stages about as even as can be, then those with the fewest bytes between them."""
        return cheapest(costs, [self._bytes[unit] for unit in units], num_stages)

    def verify(self, stages: Sequence[nn.Module]) -> None:
        """Compare with the model in evaluation and in training, and for another number of rows."""
        assert self._inputs is not None
        whole = self._inputs
        part = tuple(x[:-1] if x.dim() and len(x) == len(whole[0]) > 2 else x for x in whole)
        modes = {module: True for stage in stages for module in stage.modules()}
        modes |= {module: module.training or not self._model.training for module in self._model.modules()}
        self._compare(stages, part)
        self._compare(stages, whole, modes)

    def _why_different(self) -> str:
        return f"its forward does other things than torch.export has seen. {REMEDY}"

    def _number(self) -> dict[fx.Node, int]:
        order = [node for node in self._graph.nodes if self._computes(node)]
        self._divide(self._fine(order))
        looks = list(self._look())
        barred = held_together(order, looks)
        self._costly = self._anchors(order, looks[0])
        places = {node: position for position, node in enumerate(order)}
        self._starts, self._bytes, last = [0], {0: 0}, self._costly[0]
        costly = [last]
        for node in self._costly[1:]:
            open_to = (p for p in range(places[last] + 1, places[node] + 1) if p not in barred)
            sizes = {p: size for p in open_to if (size := self._size(p, looks[0])) is not None}
            last = node
            if sizes:
                self._starts.append(min(sizes, key=lambda p: (sizes[p], -p)))
                self._bytes[len(self._starts) - 1] = sizes[self._starts[-1]]
                costly.append(node)
        self._costly = costly
        self._bytes[len(self._starts)] = 0
        return {node: bisect_right(self._starts, place) - 1 for node, place in self._units.items()}

    def _fine(self, order: Sequence[fx.Node]) -> dict[fx.Node, int]:
        # Each operation a unit; what stages compute for themselves is with the next one.
        units, position = {}, 0
        for node in self._graph.nodes:
            units[node] = min(position, len(order) - 1)
            position += self._computes(node)
        return units

    def _anchors(self, order: Sequence[fx.Node], look: OperationRecorder) -> list[fx.Node]:
        def reads_matrix(node: fx.Node) -> bool:
            own = [self._targets[str(each.target)] for each in node.all_input_nodes if each.op == "get_attr"]
            return any(isinstance(value, nn.Parameter) and value.dim() > 1 for value in own)

        return [node for node in order if look.seen[node].flops or reads_matrix(node)] or list(order)

    def _size(self, position: int, look: OperationRecorder) -> int | None:
        # How many bytes of the example would travel there; None if nothing can.
        live = self._live(position)
        travels = [node for node in live if not self._outlined(node, position)]
        certain = [node for node in travels if self._forms[node] is not ValueKind.OPTIONAL]
        if any(self._forms[node] in (ValueKind.STUCK, ValueKind.PLAIN) for node in live):
            return None
        if not sum(num_leaves(self._forms[node]) for node in certain):
            return None
        return sum(look.seen[node].num_bytes for node in travels)

    def _first(self, position: int, live: Sequence[fx.Node]) -> fx.Node | None:
        # What was computed last, if a gradient flows through it.
        return next((n for n in reversed(live) if self._forms[n] is ValueKind.TENSOR and n.op != "placeholder"), None)


def several_rows(inputs: Inputs) -> Inputs:
    """A batch of two rows out of one of one: torch.export takes 1 for a size that never changes."""
    if inputs[0].dim() and len(inputs[0]) == 1:
        return tuple(torch.cat([x, x]) if x.dim() and len(x) == 1 else x for x in inputs)
    return inputs
