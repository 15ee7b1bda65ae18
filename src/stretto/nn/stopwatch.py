"""Runs layers one after the other as training does, and takes their time: the one stopwatch of layers."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.devices import synchronize
from stretto.nn.shapes import describe

T = TypeVar("T")


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What a call returns, and the nanoseconds until it and the device have done their work."""
    synchronize(device)
    begin = time.perf_counter_ns()
    result = call()
    synchronize(device)
    return result, time.perf_counter_ns() - begin


def as_leaves(tensors: Sequence[Tensor], *, first: bool) -> tuple[Tensor, ...]:
    """A layer's inputs as in training: those of the first layer want no gradient, those of the others do."""
    return tuple(t.detach().requires_grad_(not first and t.is_floating_point()) for t in tensors)


def attempt(layer: Callable[..., Any], name: str, arguments: Sequence[Any], remedy: str) -> Any:
    """Call a layer. Raises UsageError, with the shapes that reached it and the remedy, if it fails."""
    try:
        return layer(*arguments)
    except Exception as error:
        came = "; ".join(describe((x,)) if isinstance(x, Tensor) else f"a {type(x).__name__}" for x in arguments)
        raise UsageError(f"{name} cannot take what reaches it for the example, {came}: {error}. {remedy}") from error
