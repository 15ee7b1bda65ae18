"""Any model that torch.export can follow, cut where the fewest bytes are sent between stages: the last resort."""

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
from stretto.splitting.graph_operations import OperationRecorder, held_together
from stretto.splitting.parts import tally, tied
from stretto.splitting.proof import Proof, compare_outputs


class Exported(Traced):
    """The exported forward of a model, in pieces of one costly operation each.

    An operation is costly if torch counts FLOPs for it, or if it reads a weight matrix. All cuts between two costly
    operations balance equally, so pieces meet where the fewest bytes pass; of equal positions, at the last:

        conv2d  batch_norm  relu_  |  conv2d  add  relu  |  mean  linear
        --------- piece 0 --------   ----- piece 1 -----   -- piece 2 --

    No cut separates operations that share a buffer which changes, or a tensor that is changed in place. Of the values
    sent to the next stage, the one computed last comes first.
    """

    noun = "piece"

    def __init__(
        self, model: nn.Module, inputs: Inputs, names: Sequence[str] | None, reason: str, *, together: bool
    ) -> None:
        call = find_call(model, len(inputs), names)
        inputs = several_rows(inputs)
        self._reason = reason
        super().__init__(model, call, export(model, call, inputs), inputs)
        names = [self.name(index, index + 1) for index in range(len(self))]
        self.joints = tied(self._parameters(), names) if together else {}

    def __len__(self) -> int:
        """The number of pieces."""
        return len(self._starts)

    def name(self, start: int, stop: int) -> str:
        """The pieces from `start` up to `stop`, with the modules of their costly operations, for messages."""
        first, last = (self._costly[index] for index in (start, stop - 1))
        where = path_of(first) or first.name
        if stop == start + 1:
            return f"piece {start} ({where})"
        return f"pieces {start} to {stop - 1} ({where} to {path_of(last) or last.name})"

    def kinds(self, start: int, stop: int) -> str:
        """The classes of the innermost modules whose forwards the pieces from `start` up to `stop` come from."""
        paths = dict.fromkeys(path_of(node) for node in self._graph.nodes if self._in_units(node, start, stop))
        modules = dict(self._model.named_modules())
        return tally(modules[path] for path in paths if path in modules and not list(modules[path].children()))

    def notes(self, bounds: Sequence[int]) -> list[str]:
        """Why the model was exported, what each stage sends, and which pieces had to stay together."""
        sent = []
        for index, position in enumerate(bounds[1:-1]):
            names = ", ".join(node.name for node in self._sent_whole(position))
            sent.append(f"sent from stage {index} to stage {index + 1}: {self._bytes[position]:,} bytes ({names})")
        outputs = [f"output: {', '.join(self._outputs)}"] if self._outputs else []
        return [f"cut by torch.export: {self._reason}", *sent, *outputs, *super().notes(bounds)]

    def divisible(self, index: int) -> bool:
        """False: a piece is one costly operation, or operations that no cut may separate."""
        return False

    def choose(self, costs: Sequence[int], units: Sequence[int], num_stages: int) -> list[int]:
        """Of all nearly even stages, those with the fewest bytes sent between them."""
        return cheapest(costs, [self._bytes[unit] for unit in units], num_stages)

    def verify(self, stages: Sequence[nn.Module], inputs: Inputs | None) -> Proof:
        """On one row fewer, too, since any number of rows will do."""
        assert self._inputs is not None
        proof = super().verify(stages, self._inputs)
        rows = len(self._inputs[0]) if self._inputs[0].dim() else 0
        if rows > 2:
            fewer = tuple(x[:-1] if x.dim() and len(x) == rows else x for x in self._inputs)
            compare_outputs(self.original, stages, fewer, self.why_different())
        return proof

    def why_different(self) -> str:
        """An operation that is not recorded."""
        return f"its forward does not do what torch.export recorded. {REMEDY}"

    def _number(self) -> dict[fx.Node, int]:
        order = [node for node in self._graph.nodes if self._computes(node)]
        self._divide(self._operation_units(order))
        recorders = list(self._record_operations())
        barred = held_together(order, recorders)
        self._costly = self._costly_operations(order, recorders[0])
        positions = {node: position for position, node in enumerate(order)}
        self._starts, self._bytes, last_costly = [0], {0: 0}, self._costly[0]
        costly = [last_costly]
        for node in self._costly[1:]:
            allowed = (p for p in range(positions[last_costly] + 1, positions[node] + 1) if p not in barred)
            sizes = {p: size for p in allowed if (size := self._size(p, recorders[0])) is not None}
            last_costly = node
            if sizes:
                self._starts.append(min(sizes, key=lambda p: (sizes[p], -p)))
                self._bytes[len(self._starts) - 1] = sizes[self._starts[-1]]
                costly.append(node)
        self._costly = costly
        self._bytes[len(self._starts)] = 0
        return {node: bisect_right(self._starts, place) - 1 for node, place in self._units.items()}

    def _operation_units(self, order: Sequence[fx.Node]) -> dict[fx.Node, int]:
        # One unit for each operation; nodes that every stage computes itself join the next operation's unit.
        units, position = {}, 0
        for node in self._graph.nodes:
            units[node] = min(position, len(order) - 1)
            position += self._computes(node)
        return units

    def _costly_operations(self, order: Sequence[fx.Node], recorder: OperationRecorder) -> list[fx.Node]:
        def reads_matrix(node: fx.Node) -> bool:
            attributes = [self._targets[str(used.target)] for used in node.all_input_nodes if used.op == "get_attr"]
            return any(isinstance(value, nn.Parameter) and value.dim() > 1 for value in attributes)

        return [node for node in order if recorder.records[node].flops or reads_matrix(node)] or list(order)

    def _size(self, position: int, recorder: OperationRecorder) -> int | None:
        # Bytes of the example sent across a cut at `position`; None if no cut is possible there.
        live = self._live(position)
        sent = [node for node in live if not self._outlined(node, position)]
        certain = [node for node in sent if self._forms[node] is not ValueKind.OPTIONAL]
        if any(self._forms[node] in (ValueKind.STUCK, ValueKind.PLAIN) for node in live):
            return None
        if not sum(num_leaves(self._forms[node]) for node in certain):
            return None
        return sum(recorder.records[node].num_bytes for node in sent)

    def _first(self, position: int, live: Sequence[fx.Node]) -> fx.Node | None:
        # The tensor computed last of those that carry a gradient.
        return next((n for n in reversed(live) if self._forms[n] is ValueKind.TENSOR and n.op != "placeholder"), None)


def several_rows(inputs: Inputs) -> Inputs:
    """The inputs, a batch of one row repeated to two: torch.export treats the size 1 as fixed."""
    if inputs[0].dim() and len(inputs[0]) == 1:
        return tuple(torch.cat([x, x]) if x.dim() and len(x) == 1 else x for x in inputs)
    return inputs
