"""The state of a data loader as a checkpoint's manifest holds it: tensors and arrays as bytes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TENSOR, ARRAY = "stretto tensor", "stretto array"


def packed(state: Any) -> Any:
    """Replace tensors and arrays by (tag, type, shape, bytes), in dicts, lists and tuples."""
    if isinstance(state, Tensor):
        array = state.detach().cpu().contiguous()
        content = array.flatten().view(torch.uint8).numpy().tobytes()
        return (TENSOR, str(array.dtype).removeprefix("torch."), list(array.shape), content)
    if isinstance(state, np.ndarray | np.generic):
        return (ARRAY, str(state.dtype), list(state.shape), state.tobytes())
    if isinstance(state, Mapping):
        return {key: packed(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([packed(value) for value in state])
    return state


def unpacked(state: Any) -> Any:
    """The state that `packed` was given; numbers of NumPy come back as arrays without dimensions."""
    if isinstance(state, tuple) and len(state) == 4 and state[0] in (TENSOR, ARRAY):
        kind, dtype, shape, content = state
        if kind == ARRAY:
            return np.frombuffer(content, dtype=dtype).reshape(shape).copy()
        flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)) if content else torch.empty(0)
        return flat.to(getattr(torch, dtype)).reshape(shape)
    if isinstance(state, dict):
        return {key: unpacked(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([unpacked(value) for value in state])
    return state
