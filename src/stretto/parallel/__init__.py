"""Parallelism inside a stage, over a torch DeviceMesh: it changes a stage's cost, not the pipeline's schedule.

`spatial`, `scatter` and `collect` cut images by height and width (`parallel/space`); `tensor` and `gather` cut weights
(`parallel/operator`).
"""

from typing import TYPE_CHECKING

from stretto.options.lazy_names import lazy_names

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

__getattr__ = lazy_names(__name__, _HOMES)  # as `stretto` does


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
