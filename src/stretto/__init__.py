"""Stretto trains deep networks on many workers, with or without backpropagation's locks.

::

    import stretto

    stages = stretto.split(model, 4, example=x)
    trainer = stretto.Trainer(stages, loss=cross_entropy, optimizer=make_sgd, method="overlapping", example=x)
    for x, y in batches:
        loss = trainer.step(x, y)
    trainer.flush()
"""

from typing import TYPE_CHECKING, Any

from stretto.errors import ScheduleError, StrettoError, UsageError

if TYPE_CHECKING:
    from stretto import collectives, losses, parallel
    from stretto.heads import LocalLoss
    from stretto.landscape.cosine import alignment
    from stretto.landscape.noise import noise_scale
    from stretto.landscape.probes import probes
    from stretto.landscape.sharpness import sharpness
    from stretto.losses.value import mean
    from stretto.mesh import Mesh
    from stretto.methods import Method, method
    from stretto.norms import group_norm
    from stretto.optim.scaling import scale_for_batch
    from stretto.splitting import split
    from stretto.sync import AllReduce, DiLoCo, FullyShard, LocalSGD, ParameterServer
    from stretto.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "AllReduce",
    "DiLoCo",
    "FullyShard",
    "LocalLoss",
    "LocalSGD",
    "Mesh",
    "Method",
    "ParameterServer",
    "ScheduleError",
    "StrettoError",
    "Trainer",
    "UsageError",
    "alignment",
    "collectives",
    "group_norm",
    "losses",
    "mean",
    "method",
    "noise_scale",
    "parallel",
    "probes",
    "scale_for_batch",
    "sharpness",
    "split",
]

_HOMES = {
    "AllReduce": "stretto.sync",
    "DiLoCo": "stretto.sync",
    "FullyShard": "stretto.sync",
    "LocalLoss": "stretto.heads",
    "LocalSGD": "stretto.sync",
    "Mesh": "stretto.mesh",
    "Method": "stretto.methods",
    "ParameterServer": "stretto.sync",
    "Trainer": "stretto.trainer",
    "alignment": "stretto.landscape.cosine",
    "group_norm": "stretto.norms",
    "mean": "stretto.losses.value",
    "method": "stretto.methods",
    "noise_scale": "stretto.landscape.noise",
    "probes": "stretto.landscape.probes",
    "scale_for_batch": "stretto.optim.scaling",
    "sharpness": "stretto.landscape.sharpness",
    "split": "stretto.splitting",
}
_PARTS = ("collectives", "losses", "parallel")  # modules that are asked for by their own name


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: `stretto --help` must not wait for torch."""
    if name not in _HOMES and name not in _PARTS:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    import importlib

    if name in _PARTS:
        return importlib.import_module(f"stretto.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_PARTS])
