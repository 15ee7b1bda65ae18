"""The arguments of a Trainer that hold for all its stages: checked once, frozen, and passed whole."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stretto.losses import Loss
from stretto.mesh import Mesh
from stretto.methods import Method
from stretto.replicas import Sync
from stretto.stage.precision import Precision


@dataclass(frozen=True, kw_only=True, eq=False)
class Specification:
    """The arguments of `Trainer` that hold for all its stages.

    `loss` is what `stretto.losses.understand` returned for the user's. `optimizer` and `scheduler` are the user's
    functions, called once a stage. `recompute` is a member of `stretto.nn.layer_recompute.RECOMPUTE`.
    """

    method: Method
    loss: Loss
    optimizer: Callable[..., Any]
    scheduler: Callable[..., Any] | None = None
    clip: float | None = None
    precision: Precision
    device: torch.device
    seed: int = 0
    mesh: Mesh
    sync: Sync
    recompute: str = "none"
