"""What a traced forward decides by: shapes and types, as the example has them."""

from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

from stretto.errors import UsageError
from stretto.nn.devices import SPECIFIC_ATTRIBUTES

PLAIN_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "itemsize", "layout", *SPECIFIC_ATTRIBUTES}
PLAIN_METHODS = {"size", "dim", "numel", "nelement", "item", "stride", "is_floating_point", "element_size"}
PLAIN_OPERATIONS = {torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, torch.ops.aten.sym_stride.int}
OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def asks(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its shape, type, device or only number."""
    if node.op == "call_function":
        if node.target in PLAIN_OPERATIONS:
            return True
        return node.target is getattr and node.args[1] in PLAIN_ATTRIBUTES
    return node.op == "call_method" and node.target in PLAIN_METHODS


def reckons(node: fx.Node) -> bool:
    """Whether a node gives shapes and numbers if that is what it is given: arithmetic, comparison, indexing."""
    module = getattr(node.target, "__module__", "")
    return node.op == "call_method" or module in ("_operator", "math", "builtins")


def settled(node: fx.Node) -> bool:
    """Whether shapes and types alone, never the numbers in a tensor, decide what a node gives."""
    if asks(node):
        return node.target != "item"
    inputs = node.all_input_nodes
    return reckons(node) and bool(inputs) and all(map(settled, inputs))


def hold(value: Any, decided: Any, place: str) -> None:
    """Part of a stage: a decision that was traced must be the one that this batch asks for."""
    found = len(value) if isinstance(value, tuple) else bool(value)
    if found != decided:
        raise UsageError(
            f"the model decides by its batch's shapes or types at {place}: it was split with an example for which that "
            f"gave {decided}, this batch gives {found}. Split it with an example like the batches it will see"
        )


def decision_of(value: Any) -> bool | int:
    """What `hold` compares: whether a value is true; of a tuple that is iterated, its length."""
    return len(value) if isinstance(value, tuple) else bool(value)


def asking(frame: FrameType | None) -> str:
    """The user's line that asks, for messages."""
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
