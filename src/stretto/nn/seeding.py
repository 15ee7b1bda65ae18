"""Derives a seed for every random draw from the user's one seed, so that draws do not depend on each other's order."""

from zlib import crc32

import torch
from torch import Tensor

from stretto.nn.devices import generator_of

_MASK = (1 << 64) - 1


def derive(seed: int, *parts: int | str) -> int:
    """Mix `seed` with the `parts` of a place ("model", stage, micro-batch, ...) into a seed of 63 bits.

    The same place gives the same seed on any number of workers, in any process and on any machine (Python's own
    `hash` would not). The mixing is splitmix64's finalizer; it takes about a microsecond.
    """
    state = seed & _MASK
    for part in parts:
        word = crc32(part.encode()) + 0x51ED2701 if isinstance(part, str) else part
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


class PreservedGenerator:
    """A context that restores the device's global random generator on exit; `seed` sets it in between."""

    def __init__(self, device: torch.device) -> None:
        self._generator = generator_of(device)
        self._state: Tensor | None = None

    def seed(self, seed: int) -> None:
        """Set the generator's seed."""
        self._generator.manual_seed(seed)

    def __enter__(self) -> "PreservedGenerator":
        self._state = self._generator.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._state is not None
        self._generator.set_state(self._state)


class ForwardSeeds:
    """Seeds the device's generator before each forward of a stage.

    A stage's random draws (dropout) depend on the seed, the stage, the replica and the micro-batch only.
    """

    def __init__(self, device: torch.device, seed: int, stage: int, replica: int = 0) -> None:
        base = derive(seed, "forward", stage)
        self._base = derive(base, "replica", replica) if replica else base
        self._generator = generator_of(device)

    def start(self, microbatch: int) -> None:
        """Seed the generator for the forward of a micro-batch."""
        self._generator.manual_seed(derive(self._base, microbatch))
