"""Parallelism inside a stage, over a torch DeviceMesh: it changes a stage's cost, not the pipeline's schedule.

`spatial`, `scatter` and `collect` cut images by height and width (`parallel/space`); `tensor` and `gather` cut weights
(`parallel/operator`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.parallel.operator import gather, tensor
    from stretto.parallel.space import collect, scatter, spatial

__all__ = ["collect", "gather", "scatter", "spatial", "tensor"]

_HOMES = {
    "collect": "stretto.parallel.space",
    "gather": "stretto.parallel.operator",
    "scatter": "stretto.parallel.space",
    "spatial": "stretto.parallel.space",
    "tensor": "stretto.parallel.operator",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, as `stretto` does."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto.parallel' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
