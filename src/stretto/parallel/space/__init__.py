"""Spatial parallelism: the rows and columns of an image on several processes.

`geometry`, `route` and `halo` are integers only: which rows travel. Plans read them, without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.parallel.space.preparation import collect, refuse_whole, scatter, spatial, whole

__all__ = ["collect", "refuse_whole", "scatter", "spatial", "whole"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, as that needs torch."""
    if name not in __all__:
        raise AttributeError(f"module 'stretto.parallel.space' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("stretto.parallel.space.preparation"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
