"""A model that calls a list of blocks, cut between the blocks."""

from collections.abc import Mapping, Sequence

from torch import fx, nn

from stretto.splitting.cost import Inputs
from stretto.splitting.forward_arguments import find_call
from stretto.splitting.fx.graph import TraceError, record
from stretto.splitting.fx.module_units import Units
from stretto.splitting.parts import tied


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
        """The number of blocks."""
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
