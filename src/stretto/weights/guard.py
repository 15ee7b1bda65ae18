"""The one place that uses private parts of torch: to change weights between a forward and its backward unnoticed.

`tests/weights/test_guard.py` fails if `torch.autograd._unsafe_preserve_version_counter` stops meaning what is written
here. Where it is missing, `Live` keeps weights by name instead (`reads.py`), which needs nothing
private and costs a Python call for each tensor that a graph saves.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

NAME = "_unsafe_preserve_version_counter"


def available() -> bool:
    """Whether this torch can leave version counters as they are."""
    return hasattr(torch.autograd, NAME)


def unnoticed(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """In-place changes of `parameters` inside it do not count: a graph that saved them reads the changed values.

    Sound only for weights that a graph saved as they are, which `check.run` makes sure of: a copy made in the forward
    (autocast, weight_norm) goes on being read as it was.
    """
    context: AbstractContextManager[None] = getattr(torch.autograd, NAME)(tuple(parameters))
    return context


def innermost_hook() -> Callable[[Any], Any] | None:
    """The function that packs what autograd saves just now; None if there is none, or if torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top(False) if top is not None else None
    return hooks[0] if hooks is not None else None
