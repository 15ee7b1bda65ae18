"""Nested states, such as an optimizer's, as values that can be sent: what is no tensor as JSON, and the tensors."""

import json
from typing import Any

from torch import Tensor

from stretto.checkpoint.tree import flatten, unflatten
from stretto.runtime.packing import as_tensor, as_text


def packed(state: Any) -> tuple[Tensor, ...]:
    """What `unpacked` makes `state` of. Raises UsageError for what a checkpoint cannot hold."""
    tree, tensors = flatten(state)
    text = json.dumps([tree, list(tensors)])
    return (as_tensor(text.encode()), *tensors.values())


def unpacked(value: tuple[Tensor, ...]) -> Any:
    """The state, on the CPU, with memory of its own."""
    tree, names = json.loads(as_text(value[0]))
    return unflatten(tree, {name: tensor.clone() for name, tensor in zip(names, value[1:], strict=True)})
