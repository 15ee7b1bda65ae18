"""A model with a list of blocks in it, cut between the blocks."""

from collections.abc import Mapping, Sequence

from torch import fx, nn

from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import find_call
from stretto.splitting.fx.graph import TraceError, record
from stretto.splitting.fx.module_units import Units
from stretto.splitting.parts import tied


class Blocks(Units):
    """The traced forward of a model, in as many units as there are blocks.

    What comes before the first block belongs to the first unit, everything else to the unit of the block before it:

        wte  wpe  add  h.0  |  h.1  |  h.2  norm  head
        ------ unit 0 ------   unit 1  ---- unit 2 ----

    What the last block gave travels before everything else.
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
        stuck = {i: joint for i in range(1, len(self)) if (joint := self._obstacle(i, names)) is not None}
        shared = tied(self._parameters(), names) if together else {}
        self.joints = dict(sorted({**stuck, **shared}.items()))

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def name(self, start: int, stop: int) -> str:
        """The blocks start up to stop."""
        names = list(self._blocks)
        if stop == start + 1:
            around = " with what comes before it" * (start == 0) + " with what comes after it" * (stop == len(self))
            return f"block {names[start]} ({type(self._blocks[names[start]]).__name__}){around}"
        return f"blocks {names[start]} to {names[stop - 1]}"

    def divisible(self, index: int) -> bool:
        """Whether a block has modules in it, or others around it."""
        block = list(self._blocks.values())[index]
        return index in (0, len(self) - 1) or any(True for _ in block.children())

    def _begins(self, node: fx.Node) -> bool:
        return node.op == "call_module" and node.target in self._blocks


def check_calls(model: nn.Module, blocks: Sequence[str], graph: fx.Graph) -> None:
    """Refuse blocks that are not called once each, in order."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_module" and node.target in blocks]
    if called == list(blocks):
        return
    missing = [name for name in blocks if name not in called]
    twice = [name for name in blocks if called.count(name) > 1]
    what = (
        f"{', '.join(twice[:4])} called more than once"
        if twice
        else f"{', '.join(missing[:4])} not called"
        if missing
        else f"called in the order {', '.join(called[:8])}"
    )
    raise TraceError(
        f"the blocks of {type(model).__name__} must be called one after the other, once each, for the model to be cut "
        f"between them: {what}. Name another list of blocks, or give a list of layers"
    )
