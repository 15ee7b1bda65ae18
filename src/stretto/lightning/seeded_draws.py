"""Random numbers of a step: the same in each of its runs, and none is taken from the global generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from stretto.nn.preserve import python_generators_restored
from stretto.nn.seeding import PreservedGenerator


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """In this block torch, NumPy and random draw from `seed`; afterwards they go on as if nothing had been drawn."""
    cpu = torch.device("cpu")
    with python_generators_restored(), PreservedGenerator(cpu) as on_cpu, PreservedGenerator(device) as on_device:
        on_cpu.seed(seed)
        if device != cpu:
            on_device.seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        yield
