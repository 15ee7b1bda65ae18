"""The decisions of a traced forward: on the shapes and types of the example, and checked for other batches."""

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


def reads_metadata(node: fx.Node) -> bool:
    """Whether a node reads a tensor's shape, dtype, device or single element."""
    if node.op == "call_function":
        if node.target in PLAIN_OPERATIONS:
            return True
        return node.target is getattr and node.args[1] in PLAIN_ATTRIBUTES
    return node.op == "call_method" and node.target in PLAIN_METHODS


def computes_plainly(node: fx.Node) -> bool:
    """Whether a node gives shapes and numbers if its inputs are such: arithmetic, comparison, indexing."""
    module = getattr(node.target, "__module__", "")
    return node.op == "call_method" or module in ("_operator", "math", "builtins")


def settled(node: fx.Node) -> bool:
    """Whether a node's value depends on shapes and types alone, never on a tensor's elements."""
    if reads_metadata(node):
        return node.target != "item"
    inputs = node.all_input_nodes
    return computes_plainly(node) and bool(inputs) and all(map(settled, inputs))


def hold(value: Any, decided: Any, place: str) -> None:
    """Part of a stage: raise UsageError if this batch decides otherwise than the traced example."""
    present = len(value) if isinstance(value, tuple) else bool(value)
    if present != decided:
        raise UsageError(
            f"the model decides by its batch's shapes or types at {place}: it was split with an example that gave "
            f"{decided}, this batch gives {present}. Split it with an example like the batches it will see"
        )


def decision_of(value: Any) -> bool | int:
    """The value that `hold` compares: the length of a tuple, which the forward iterates; else whether it is true."""
    return len(value) if isinstance(value, tuple) else bool(value)


def deciding_line(frame: FrameType | None) -> str:
    """The user's line that decides, as "file:line", for messages."""
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
