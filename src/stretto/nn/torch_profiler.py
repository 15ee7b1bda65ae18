"""How torch's profiler is kept from what it cannot do beside messages, and from writing to stderr."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
