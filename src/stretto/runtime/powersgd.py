"""PowerSGD (Vogels et al. 2019) as torch's communication hook does it, for one stage, and what it must not forget."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

START = 10  # updates that are reduced whole before PowerSGD begins


class PowerSGD:
    """The hook and its state: what compression has left out so far, each replica its own, and the newest factors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._state = self._new()

    def _new(self) -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            process_group=self._group, matrix_approximation_rank=1, start_powerSGD_iter=START
        )

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The mean of all replicas' buckets."""
        return powerSGD_hook.powerSGD_hook(self._state, bucket)

    def state_dict(self) -> dict[str, Any]:
        """Errors and factors by the number of their bucket, the count of updates, the generator of new factors."""
        state = self._state
        generator: Any = state.rng.get_state()
        name, keys, position, has_gauss, gauss = generator
        return {
            "updates": state.iter,
            "errors": dict(state.error_dict),
            "p": dict(state.p_memory_dict),
            "q": dict(state.q_memory_dict),
            "generator": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; from the beginning if there is None."""
        self._state = self._new()
        if state is None:
            return
        self._state.iter = state["updates"]
        self._state.error_dict = dict(state["errors"])
        self._state.p_memory_dict = dict(state["p"])
        self._state.q_memory_dict = dict(state["q"])
        name, keys, position, has_gauss, gauss = state["generator"]
        self._state.rng.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
