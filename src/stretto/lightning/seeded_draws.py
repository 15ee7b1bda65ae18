"""Random numbers of a step: the same in each of its runs, and none is taken from the global generators."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from stretto.nn.devices import generator_of
from stretto.nn.preserve import python_generators_restored
from stretto.nn.seeding import PreservedGenerator


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """In this block torch, NumPy and random draw from `seed`; afterwards they go on as if nothing had been drawn.

    Yields a function that says whether anything has been drawn.
    """
    cpu = torch.device("cpu")
    with python_generators_restored(), PreservedGenerator(cpu) as on_cpu, PreservedGenerator(device) as on_device:
        on_cpu.seed(seed)
        if device != cpu:
            on_device.seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        begins = states(device)
        yield lambda: states(device) != begins


def states(device: torch.device) -> list[bytes]:
    """The states of all generators that a step may draw from."""
    of_torch = [generator_of(each).get_state().numpy().tobytes() for each in {torch.device("cpu"), device}]
    return [*of_torch, repr(random.getstate()).encode(), pickle.dumps(np.random.get_state())]
