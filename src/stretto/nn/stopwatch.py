"""Runs and times a layer as training does, for every measurement of layers; and keeps torch's profiler in bounds."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.devices import synchronize
from stretto.nn.input_errors import advice_on
from stretto.nn.shapes import describe

T = TypeVar("T")


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """A call's result, and the nanoseconds until the device has finished the call's work."""
    synchronize(device)
    begin = time.perf_counter_ns()
    result = call()
    synchronize(device)
    return result, time.perf_counter_ns() - begin


def as_leaves(tensors: Sequence[Tensor], *, first: bool) -> tuple[Tensor, ...]:
    """A layer's inputs as training has them: detached, requiring gradients unless the layer is the `first`."""
    return tuple(t.detach().requires_grad_(not first and t.is_floating_point()) for t in tensors)


def attempt(layer: Callable[..., Any], name: str, arguments: Sequence[Any], remedy: str) -> Any:
    """Return `layer(*arguments)`. Raises UsageError, with the arguments' shapes and the remedy, if the call fails."""
    try:
        return layer(*arguments)
    except Exception as error:
        given = "; ".join(describe((a,)) if isinstance(a, Tensor) else f"a {type(a).__name__}" for a in arguments)
        raise UsageError(
            f"{name} cannot take what reaches it for the example, {given}: {error}. {advice_on(error)}{remedy}"
        ) from error


SILENT = {"KINETO_LOG_LEVEL": "6"}  # the profiler's library writes to stderr whenever it starts or stops


def recording_operations(*, on: bool) -> None:
    """Whether the profiler hears of what this thread does: messages between actions must not be recorded.

    gloo ends them in threads of its own, by calling a profiler that has stopped meanwhile: torch 2.13 crashes.
    """
    torch.autograd._enable_record_function(on)  # type: ignore[attr-defined]


@contextmanager
def silence() -> Iterator[None]:
    """Keep the profiler's library from writing to stderr, unless the user wants it to: it reads this as it starts."""
    unset = {name: value for name, value in SILENT.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]
