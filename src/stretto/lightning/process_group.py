"""What the processes of a job tell each other besides training: records, weights, random generators, decisions."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from stretto.nn.buckets import align, tensors_of
from stretto.runtime import membership


class Processes:
    """This process among those of the job; all methods are collectives. One process alone sends nothing."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        member = membership(timeout) if size > 1 else None
        self._group = None if member is None else member.group_set(self, timeout).whole()

    def all_of(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value, group=self._group)
        return told

    def on_first(self, value: Any) -> list[Any] | None:
        """The values of all processes, by rank, on rank 0; None elsewhere."""
        if self._group is None:
            return [value]
        told: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, told, dst=0, group=self._group)
        return told

    def from_first(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`."""
        if self._group is None:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=source, group=self._group)
        return told[0]

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def share_weights(self, module: nn.Module) -> None:
        """Give all processes the weights and buffers of rank 0."""
        if self._group is not None:
            align(tensors_of([module]), self._group)

    def share_generators(self) -> None:
        """Give all processes the states of rank 0's random generators: they are to draw the same batches."""
        if self._group is None:
            return
        states = self.from_first((random.getstate(), np.random.get_state(), torch.get_rng_state()))
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def first_that(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None), None)
