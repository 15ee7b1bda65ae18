"""Stretto trains deep networks on many workers, with or without backpropagation's locks.

::

    import stretto

    stages = stretto.split(model, 4, example=x)
    trainer = stretto.Trainer(stages, loss=cross_entropy, optimizer=make_sgd, method="overlapping", example=x)
    for x, y in batches:
        loss = trainer.step(x, y)
    trainer.flush()
"""

import _signal  # `signal` makes enums for milliseconds
import os
import sys


def _is_command() -> bool:
    """Whether this process is a command: `python -m stretto`, or the script `stretto` beside its Python."""
    if sys.argv[:1] == ["-m"]:  # as it is while Python looks for the module
        return sys.orig_argv[-len(sys.argv)] in ("stretto", "-mstretto")
    script = os.path.join(os.path.dirname(sys.executable), "stretto")  # noqa: PTH118, PTH120 - pathlib takes milliseconds
    return sys.argv[:1] != [] and os.path.realpath(sys.argv[0]) == script


if _is_command() and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # Until stretto.interrupts takes it, Ctrl-C ends the process as SIGTERM does, without a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

TYPE_CHECKING = False  # `typing` takes milliseconds, too
if TYPE_CHECKING:
    from typing import Any

    from stretto import collectives, losses, optim, parallel, trackers
    from stretto.analysis.diagnosis.api import diagnose
    from stretto.analysis.gradient_cosine import alignment
    from stretto.analysis.linear_probes import probes
    from stretto.analysis.noise_scale import noise_scale
    from stretto.analysis.sharpness import sharpness
    from stretto.analysis.stable_rate import stable_rate
    from stretto.errors import ScheduleError, StrettoError, UsageError
    from stretto.heads import LocalLoss
    from stretto.losses.value import mean
    from stretto.mesh import Mesh
    from stretto.methods import Method, method
    from stretto.methods.advice import advised
    from stretto.nn.group_norm import group_norm
    from stretto.optim.learning_rates import scale_for_batch
    from stretto.replicas import AllReduce, DiLoCo, FullyShard, LocalSGD, ParameterServer, ShardOptimizer
    from stretto.splitting import split
    from stretto.study.python_calls import compare, train
    from stretto.trainer.history import EarlyStop, History
    from stretto.trainer.trainer import Trainer

__version__ = "0.2.0"
__all__ = [
    "AllReduce",
    "DiLoCo",
    "EarlyStop",
    "FullyShard",
    "History",
    "LocalLoss",
    "LocalSGD",
    "Mesh",
    "Method",
    "ParameterServer",
    "ScheduleError",
    "ShardOptimizer",
    "StrettoError",
    "Trainer",
    "UsageError",
    "advised",
    "alignment",
    "collectives",
    "compare",
    "diagnose",
    "group_norm",
    "losses",
    "mean",
    "method",
    "noise_scale",
    "optim",
    "parallel",
    "probes",
    "scale_for_batch",
    "sharpness",
    "split",
    "stable_rate",
    "trackers",
    "train",
]

_HOMES = {
    "AllReduce": "stretto.replicas",
    "DiLoCo": "stretto.replicas",
    "EarlyStop": "stretto.trainer.history",
    "FullyShard": "stretto.replicas",
    "History": "stretto.trainer.history",
    "LocalLoss": "stretto.heads",
    "LocalSGD": "stretto.replicas",
    "Mesh": "stretto.mesh",
    "Method": "stretto.methods",
    "ParameterServer": "stretto.replicas",
    "ScheduleError": "stretto.errors",
    "ShardOptimizer": "stretto.replicas",
    "StrettoError": "stretto.errors",
    "Trainer": "stretto.trainer.trainer",
    "UsageError": "stretto.errors",
    "alignment": "stretto.analysis.gradient_cosine",
    "compare": "stretto.study.python_calls",
    "diagnose": "stretto.analysis.diagnosis.api",
    "group_norm": "stretto.nn.group_norm",
    "mean": "stretto.losses.value",
    "method": "stretto.methods",
    "advised": "stretto.methods.advice",
    "noise_scale": "stretto.analysis.noise_scale",
    "probes": "stretto.analysis.linear_probes",
    "scale_for_batch": "stretto.optim.learning_rates",
    "sharpness": "stretto.analysis.sharpness",
    "split": "stretto.splitting",
    "stable_rate": "stretto.analysis.stable_rate",
    "train": "stretto.study.python_calls",
}
_PARTS = (
    "collectives",
    "errors",
    "heads",
    "losses",
    "methods",
    "optim",
    "parallel",
    "trackers",
)  # modules that are asked for by their own name


def __getattr__(name: str) -> "Any":
    """Import what is asked for when it is asked for: `stretto --help` must not wait for torch."""
    if name not in _HOMES and name not in _PARTS:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    import importlib

    if name in _PARTS:
        return importlib.import_module(f"stretto.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_PARTS])
