"""Private functions of torch that let weights change between a forward and its backward without an error.

`tests/weights/test_guard.py` fails if `torch.autograd._unsafe_preserve_version_counter` stops meaning what is written
here. Where it is missing, `Live` has the graph save weights by name instead (`saved_by_name.py`). That needs no private
function and costs a Python call for each tensor that a graph saves.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

NAME = "_unsafe_preserve_version_counter"


def available() -> bool:
    """Whether this torch has the function that `unnoticed` needs."""
    return hasattr(torch.autograd, NAME)


def unnoticed(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A context in which in-place changes of `parameters` leave their version counters as they are.

    A backward through a graph that saved the parameters then reads the changed values and raises no error. Sound only
    where the graph saved the parameters themselves, which `check.checked_call` makes sure of: a copy made in the
    forward (autocast, weight_norm) would keep the old values.
    """
    context: AbstractContextManager[None] = getattr(torch.autograd, NAME)(tuple(parameters))
    return context


def innermost_hook() -> Callable[[Any], Any] | None:
    """The pack function of the innermost `saved_tensors_hooks` in effect; None without one, or if torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top(False) if top is not None else None
    return hooks[0] if hooks is not None else None
