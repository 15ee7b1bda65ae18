"""Work that keeps a process busy as training does, for what is measured beside it."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from stretto.measure.messages import agreed, seconds

WARM = 10


class SampleWork:
    """Forwards and backwards, which use memory and caches as training does: products alone are too regular."""

    def __init__(self) -> None:
        self._layers = nn.Sequential(nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 192), nn.LayerNorm(192))
        self._x = torch.randn(64, 192)
        self(WARM)

    def __call__(self, number: int) -> None:
        """Work so many times."""
        for _ in range(number):
            self._layers.zero_grad()
            self._layers(self._x).sum().backward()

    def number_in(self, wanted: float, group: dist.ProcessGroup, *, trials: int) -> int:
        """How often it runs in so many seconds, at least once; the same number on all processes, which try together."""
        return max(1, round(wanted / agreed(group, seconds(partial(self, trials)) / trials)))
